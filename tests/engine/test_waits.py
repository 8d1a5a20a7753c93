"""A pass through the backbone never waits for the device: whatever would read a tensor back is counted.

On a CPU nothing waits, but the same calls are made: operators whose result's size or value the host needs, and the
methods by which Python reads a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.modeling.model import MultiTaskPeftModel

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "__array__")
DATA_DEPENDENT = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "bincount")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
BACKBONES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, **SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=32, head_dim=8, **SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
}


class _Watch(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
        if name.startswith(DATA_DEPENDENT) or masks:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count every way in which the host reads what a tensor holds."""
    found: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in READS:
            original = getattr(torch.Tensor, name)

            def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
                found[_name] += 1
                return _original(self, *args)

            patch.setattr(torch.Tensor, name, counted)
        with _Watch(found):
            yield found


def rows(task: str, *lengths: int) -> list[dict[str, Any]]:
    return [{"task": task, "input_ids": [(7 * n + i) % 64 for i in range(n)]} for n in lengths]


def work() -> StepWork:
    collator = ChunkPackingCollator()
    batches: list[MuxBatch] = [collator(rows("a", 5, 9) + rows("b", 3)), collator(rows("a", 7) + rows("b", 12, 2))]
    return StepWork(("a", "b"), tuple(batches), {"a": 21, "b": 17})


def model_of(kind: str) -> MultiTaskPeftModel:
    torch.manual_seed(0)
    backbone = BACKBONES[kind]().eval()
    configs = {"a": LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1), "b": LoraConfig(r=4)}
    return MultiTaskPeftModel(backbone, configs).train()  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("qwen3", True), ("gpt2", False)])
def test_no_pass_reads_a_tensor_back(kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    if checkpointing:
        model.activation_checkpointing_enable()
    executor = Executor(model)
    executor.run(work())
    with reads(monkeypatch) as found:
        result = executor.run(work())
    assert found == Counter(), found
    assert all(loss.isfinite() for loss in result.losses.values())


def test_the_count_sees_every_way_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    with reads(monkeypatch) as found:
        x[0].item(), x.tolist(), x.nonzero(), x[x > 1], bool(x[0]), float(x[1]), torch.masked_select(x, x > 2)
    for name in ("item", "tolist", "nonzero", "index", "__bool__", "__float__", "masked_select"):
        assert found[name], name
