"""The baseline: the service with an engine that runs one call at a time through plain PEFT and `set_adapter`.

HTTP, ledger and queues are those of `peft-mux serve`. Each call is one padded batch. Snapshots have weights only.

    python -m benchmarks.service.in_turn MODEL --store DIR --served-name NAME --port N
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from peft_mux import AdamSettings, Call, CallResult
from peft_mux.calls import TaskState
from peft_mux.modeling.objectives.objective import TokenOutputs
from peft_mux.serve import app
from peft_mux.serve.checkpoints import modules_of


class CallsInTurn:
    """What the engine needs of `peft_mux.Calls`: one call each time that it advances, no sampling and no restoring."""

    def __init__(self, backbone: Any) -> None:
        self.model = SimpleNamespace(backbone=backbone, device=backbone.device)
        self._peft = get_peft_model(backbone, LoraConfig(r=1, target_modules="all-linear"), adapter_name="first")
        self._weights: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self._calls: dict[str, Call] = {}

    def open(self, name: str, config: LoraConfig, *, seed: int) -> None:
        torch.manual_seed(seed)
        self._peft.add_adapter(name, config)
        named = self._peft.named_parameters()
        self._weights[name] = weights = {key: weight for key, weight in named if f".{name}." in key}
        self._optimizers[name] = torch.optim.AdamW(weights.values())

    def drop(self, name: str) -> None:
        self._peft.delete_adapter(name)
        del self._weights[name], self._optimizers[name]

    def submit(self, call: Call) -> None:
        self._calls[call.model] = call

    def advance(self, order: Sequence[str]) -> dict[str, CallResult]:
        call = self._calls.pop(order[0])
        self._peft.set_adapter(call.model)
        rows = [torch.from_numpy(row.tokens) for row in call.examples]
        lengths = [len(row) for row in rows]
        tokens = pad_sequence(rows, batch_first=True)
        is_real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
        is_padded = not bool(is_real.all())
        logits = self._peft(input_ids=tokens, attention_mask=is_real.long() if is_padded else None).logits.float()
        targets = torch.cat([torch.from_numpy(row.targets) for row in call.examples])
        kept = logits[is_real] if is_padded else logits.flatten(0, 1)
        nll = torch.nn.functional.cross_entropy(kept, targets, reduction="none")
        columns = {
            key: torch.cat([torch.from_numpy(row.columns[key]) for row in call.examples])
            for key in call.examples[0].columns
        }
        counts = tuple(lengths)
        outputs = TokenOutputs(
            task=call.model,
            step=0,
            loss_weight=1.0,
            nll_M=nll,
            sequence_counts=counts,
            row_sequences=(1,) * len(counts),
            columns=columns,
        )
        loss = call.loss(outputs)
        if call.backward:
            loss.backward()
        logprobs = (-nll.detach()).split(lengths)
        return {call.model: CallResult(loss.item(), tuple(logprobs_of_row.numpy() for logprobs_of_row in logprobs))}

    def step(self, steps: Mapping[str, AdamSettings]) -> dict[str, float]:
        norms = {}
        for name, adam in steps.items():
            settings = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
            self._optimizers[name].param_groups[0].update(settings, weight_decay=adam.weight_decay)
            gradients = [weight.grad for weight in self._weights[name].values() if weight.grad is not None]
            norms[name] = float(torch.nn.utils.get_total_norm(gradients))
            self._optimizers[name].step()
            self._optimizers[name].zero_grad()
        return norms

    def state(self, name: str) -> TaskState:
        weights = {
            key.replace(f".{name}.", "."): weight.detach().clone() for key, weight in self._weights[name].items()
        }
        return TaskState(weights, {}, {}, {})

    def sampling(self, tokenizer: Any) -> None:
        """There is none."""


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()

    def load(model: str, *_: Any) -> Any:
        backbone = AutoModelForCausalLM.from_pretrained(model)
        modules = modules_of(backbone)
        return CallsInTurn(backbone), None, modules

    app.load = load
    app.serve(options.model, options.store, names=(options.served_name,), port=options.port)


if __name__ == "__main__":
    main()
