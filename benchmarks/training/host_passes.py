"""As `checkout_steps.py`, for the mixes `host`: the host's time of a pass on the path that CUDA takes, without a GPU.

    python -P host_passes.py CHECKOUT ROOT host[-ranks][-liger][-selective] [SHAPE LAYERS]

The plain mix has adapters of rank 16; `-ranks` has ranks 8 and 64 in turn, `-liger` Liger's kernels, and `-selective`
computes inputs of adapters again in the backward pass.

Below a few thousand tokens a pass it is not the GPU but the host, which launches its work, that sets the speed. Here
tensors are so small that their arithmetic on a CPU vanishes; Triton's launches take the way that they take on a GPU up
to the driver, which a stand-in replaces; attention over the stream does nothing as well, but is called, saved
for and differentiated as the real one. What is left is what the host does: Python, autograd, a call an operation.
Seconds are of forward and backward of a layer; the last line says how many kernels Triton was asked to launch for it.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Run a pass for each line that is read."""
    checkout, _, mix, *shape = sys.argv[1:]
    num_layers = int(shape[1]) if shape else 32
    warnings.simplefilter("ignore")
    sys.path.insert(0, checkout)
    import peft_mux

    assert str(peft_mux.__file__).startswith(checkout), f"{peft_mux.__file__} is not of {checkout}"
    import torch

    torch.set_num_threads(1)
    count = stand_in_for_driver()
    stand_in_for_device()
    run = pass_of(num_layers, mix.split("-"))
    for _ in range(int(input())):
        input()
        # The processes take turns, and the first milliseconds after a wait are slow: they belong to no contender.
        run()
        count[0], started_s = 0, time.process_time()
        run()
        print(json.dumps((time.process_time() - started_s) / num_layers), flush=True)
    print(json.dumps(f"{count[0] / num_layers:.1f} Triton launches a layer"), flush=True)


class _Kernel:
    """Stands for a compiled kernel, whose launch does nothing."""

    function, packed_metadata, metadata = 0, (), None

    def __init__(self, count: list[int]) -> None:
        self._count = count

    def launch_metadata(self, *arguments: Any) -> None:
        """Return nothing, as a compiled kernel does without a profiler."""

    def run(self, *arguments: Any) -> None:
        """Count a launch."""
        self._count[0] += 1

    def _init_handles(self) -> None:
        """Load nothing."""


def stand_in_for_driver() -> list[int]:
    """Let Triton find a GPU on which kernels need no compiling and launches do nothing; return their count."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """A driver of one Hopper GPU."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    count = [0]

    def compiled(self: Any, key: Any, *arguments: Any, **options: Any) -> _Kernel:
        kernel = _Kernel(count)
        self.device_caches[0][0][key] = kernel
        return kernel

    # Launched as a compiled kernel is, which finds the device and its stream.
    _Kernel.__getitem__ = CompiledKernel.__getitem__  # type: ignore[attr-defined]
    driver.set_active(Driver())  # type: ignore[arg-type]
    JITFunction._do_compile = compiled
    return count


def stand_in_for_device() -> None:
    """Let layers take the kernels, and attention one call that computes nothing."""
    import torch

    from peft_mux.kernels.lora import launch
    from peft_mux.modeling.adapters.lora import lora_pass
    from peft_mux.modeling.attention import packed

    class Attention(torch.autograd.Function):
        """Saves and returns what flash attention would."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)

    def attention(q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        return Attention.apply(q, k, v)

    launch.gpu_model = lambda device: "H100"
    lora_pass.runs_kernels = lambda device: True
    packed.varlen_support = lambda *arguments, **options: None
    packed.varlen_attention = attention


def pass_of(num_layers: int, words: list[str]) -> Callable[[], None]:
    """Return forward and backward of eight tasks over a Llama of tiny widths in bf16, by the words of a mix."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.modeling.backbone.liger import _patch
    from peft_mux.modeling.backbone.recompute import recompute_inputs
    from peft_mux.modeling.model import MultiTaskPeftModel

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=num_layers, num_key_value_heads=2, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    ranks = (8, 64) if "ranks" in words else (16, 16)
    configs = {f"t{index}": LoraConfig(r=ranks[index % 2], target_modules="all-linear") for index in range(8)}
    backbone = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).train()
    model = MultiTaskPeftModel(backbone, configs, seeds=dict.fromkeys(configs, 0), verify=False).train()
    if "liger" in words:
        _patch(model.backbone, {})
    if "selective" in words:
        recompute_inputs(model.backbone)
    batch = ChunkPackingCollator()([{"task": name, "input_ids": [1, 2]} for name in configs])

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = model(batch).losses
        losses.sum().backward()

    return run


if __name__ == "__main__":
    main()
