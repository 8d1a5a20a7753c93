"""Memory of the host while a sharded backbone is loaded from a folder.

transformers maps the files into memory, so that loaded weights are pages of the file, which all processes of a machine
share and the system can drop. Only what a process copies is its own: its shards.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel import parallelize
from tests.engine.processes.cases import launch, values

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup"),
]
NUM_LAYERS = 24


def own_bytes() -> int:
    """Return the memory that belongs to this process alone, without pages of mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def load_sharded(rank: int, folder: Path) -> tuple[int, int]:
    """Return the bytes that this process has of its own after loading, and at most until the backbone is sharded."""
    task = Task(
        name="a",
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        train_dataset=[{"input_ids": [1, 2, 3]}] * 4,
        train_batch_size=2,
        max_steps=1,
    )
    args = MultiTaskTrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, report_to=[], disable_tqdm=True, shard_backbone=True
    )
    trainer = MultiTaskTrainer(model=str(folder / "backbone"), tasks=[task], args=args)
    before, loaded, peak = own_bytes(), [0], [0]
    verify, shard, done = MultiTaskPeftModel.verify_once, parallelize.shard_backbone, threading.Event()

    def noted_verify(model: MultiTaskPeftModel) -> None:
        loaded[0] = own_bytes() - before
        verify(model)

    def noted_shard(*given: object) -> object:
        sharded = shard(*given)  # type: ignore[arg-type]
        peak[0] = max(peak[0], own_bytes() - before)
        done.set()
        return sharded

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], own_bytes() - before)
            time.sleep(0.002)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiTaskPeftModel, "verify_once", noted_verify)
        patch.setattr(parallelize, "shard_backbone", noted_shard)
        threading.Thread(target=watch, daemon=True).start()
        trainer.train()
    return loaded[0], peak[0]


def test_a_host_never_holds_more_than_the_shards_of_its_processes_and_a_layer_of_each(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=NUM_LAYERS, num_attention_heads=8, vocab_size=1000
    )
    backbone = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    backbone.save_pretrained(tmp_path / "backbone")
    whole = sum(item.nbytes for item in backbone.parameters())
    layer = sum(item.nbytes for item in backbone.model.layers[0].parameters())
    del backbone
    for loaded, peak in values(launch(2, load_sharded, tmp_path)):
        assert loaded < 0.1 * whole
        assert 0.5 * whole < peak < 0.5 * whole + 3 * layer  # a layer of weights, one of activations, the interpreter
