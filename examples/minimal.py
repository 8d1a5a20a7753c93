"""The idea of peft_mux in plain torch: two LoRA tasks share every pass through one frozen backbone.

    task a: rows of 5, 9, 7 tokens --.                                             .-> loss of a -> AdamW of a
                                     +-> one packed stream -> one backbone pass ->-+
    task b: rows of 12, 4 tokens ----'    (LoRA of a on a's tokens, of b on b's)   '-> loss of b -> AdamW of b

Three facts make a joint step equal to two separate steps:

1. Tokens meet only in attention, and a token attends only to its own row. So rows can lie one after another in a single
   stream, without padding.
2. The backbone is frozen. One GEMM of it serves the tokens of all tasks; each task's LoRA then adds to its own tokens.
3. Each task has its own loss, gradients, clipping, optimizer and learning rate. No value of one task enters another's.

Run `python examples/minimal.py`: it trains both tasks together and alone, and compares. In `peft_mux`, grouped kernels
replace the loop over tasks, variable-length attention replaces the mask, and a planner decides what shares a pass.

Shape letters: T tokens of a stream, D hidden features, H heads, R rank, V words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, H, NUM_LAYERS, NUM_STEPS = 50, 32, 4, 2, 20


@dataclass
class Task:
    """One user's job: rows of tokens, and LoRA factors with an optimizer of their own."""

    name: str
    rows: list[Tensor]
    rank: int
    learning_rate: float
    factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def start(self, backbone: Backbone, seed: int) -> None:
        """Draw the factors of every linear layer: A [R, in] at random, B [out, R] zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, layer in backbone.named_modules():
            if isinstance(layer, nn.Linear) and name != "head":
                a_RI = torch.randn(self.rank, layer.in_features, generator=generator) / layer.in_features**0.5
                self.factors[name] = nn.Parameter(a_RI), nn.Parameter(torch.zeros(layer.out_features, self.rank))
        self.parameters = [factor for pair in self.factors.values() for factor in pair]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.learning_rate)


@dataclass
class Stream:
    """The rows of all tasks one after another, sorted by task."""

    tokens_T: Tensor
    positions_T: Tensor
    mask_TT: Tensor
    spans: dict[str, slice]
    """The tokens of each task."""

    @classmethod
    def pack(cls, tasks: list[Task]) -> Stream:
        """Concatenate rows; positions restart at each row, and no token attends to another row."""
        rows = [row for task in tasks for row in task.rows]
        row_of_T = torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)])
        positions_T = torch.cat([torch.arange(len(row)) for row in rows])
        is_same_row_TT = row_of_T[:, None] == row_of_T[None, :]
        spans, start = {}, 0
        for task in tasks:
            end = start + sum(map(len, task.rows))
            spans[task.name], start = slice(start, end), end
        return cls(torch.cat(rows), positions_T, is_same_row_TT.tril(), spans)


class Backbone(nn.Module):
    """A small frozen decoder. Each of its linear layers calls `adapted`, which adds the adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        sizes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(D, V)
        self.requires_grad_(False)

    def forward(self, stream: Stream, tasks: list[Task]) -> Tensor:
        """Return logits [T, V] of the whole stream."""

        def adapted(name: str, x_TI: Tensor) -> Tensor:
            y_TO = self.get_submodule(name)(x_TI)  # the frozen GEMM: once, over the tokens of all tasks
            parts = []
            for task in tasks:  # slices, not masks that multiply: a NaN of one task cannot reach another
                a_RI, b_OR = task.factors[name]
                span = stream.spans[task.name]
                parts.append(y_TO[span] + x_TI[span] @ a_RI.T @ b_OR.T)
            return torch.cat(parts)

        x_TD = self.words(stream.tokens_T) + self.places(stream.positions_T)
        for number in range(NUM_LAYERS):
            layer = f"layers.{number}"
            q_TD, k_TD, v_TD = adapted(f"{layer}.qkv", F.layer_norm(x_TD, (D,))).chunk(3, dim=-1)
            q_HTE, k_HTE, v_HTE = (x_TD.unflatten(-1, (H, -1)).transpose(0, 1) for x_TD in (q_TD, k_TD, v_TD))
            mixed_HTE = F.scaled_dot_product_attention(q_HTE, k_HTE, v_HTE, attn_mask=stream.mask_TT)
            x_TD = x_TD + adapted(f"{layer}.out", mixed_HTE.transpose(0, 1).flatten(-2))
            x_TD = x_TD + adapted(f"{layer}.down", F.gelu(adapted(f"{layer}.up", F.layer_norm(x_TD, (D,)))))
        return self.head(F.layer_norm(x_TD, (D,)))


def train_step(backbone: Backbone, tasks: list[Task]) -> dict[str, float]:
    """Take one optimizer step of every task, with one forward and one backward pass of the backbone."""
    stream = Stream.pack(tasks)
    logits_TV = backbone(stream, tasks)
    labels_T = stream.tokens_T.roll(-1)
    labels_T[stream.positions_T.roll(-1) == 0] = -100  # the last token of a row predicts nothing
    losses = {
        task.name: F.cross_entropy(logits_TV[stream.spans[task.name]], labels_T[stream.spans[task.name]])
        for task in tasks
    }
    # The gradient of this sum with respect to a task's factors is that of its own loss: no other loss depends on them.
    torch.stack(list(losses.values())).sum().backward()
    for task in tasks:
        nn.utils.clip_grad_norm_(task.parameters, max_norm=1.0)
        task.optimizer.step()
        task.optimizer.zero_grad()
    return {name: loss.item() for name, loss in losses.items()}


def make_tasks() -> list[Task]:
    """Return two tasks that differ in rows, rank and learning rate."""
    generator = torch.Generator().manual_seed(0)
    lengths = {"a": (5, 9, 7), "b": (12, 4)}
    rows = {name: [torch.randint(V, (n,), generator=generator) for n in sizes] for name, sizes in lengths.items()}
    return [Task("a", rows["a"], rank=4, learning_rate=1e-2), Task("b", rows["b"], rank=8, learning_rate=3e-3)]


def train(backbone: Backbone, names: str) -> dict[str, list[float]]:
    """Train the named tasks together, from the beginning; return their losses by step."""
    tasks = [task for task in make_tasks() if task.name in names]
    for task in tasks:
        task.start(backbone, seed=ord(task.name))
    steps = [train_step(backbone, tasks) for _ in range(NUM_STEPS)]
    return {task.name: [losses[task.name] for losses in steps] for task in tasks}


if __name__ == "__main__":
    torch.manual_seed(0)
    backbone = Backbone()
    together, alone = train(backbone, "ab"), train(backbone, "a") | train(backbone, "b")
    for name, losses in together.items():
        difference = max(abs(loss - expected) for loss, expected in zip(losses, alone[name], strict=True))
        print(f"task {name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, together and alone differ by {difference:.1e}")
        assert difference < 1e-5
