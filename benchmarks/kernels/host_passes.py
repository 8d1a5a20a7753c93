"""One of the processes of `benchmarks.kernels.host_time`: runs one checkout's passes where a GPU only seems to be.

    python -P host_passes.py CHECKOUT ROOT SETTING

Each line that is read starts a pass of the multiplexed model and one of the plain backbone; each line that is written
says what they took, in processor seconds, and how many kernels Triton was asked to launch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

_ATTENTION = "host_time"
_WARM_UP_S = 0.03


def main() -> None:
    """Run a pass for each line that is read."""
    checkout, _, setting = sys.argv[1:]
    warnings.simplefilter("ignore")
    sys.path.insert(0, checkout)
    import peft_mux

    assert str(peft_mux.__file__).startswith(checkout), f"{peft_mux.__file__} is not of {checkout}"
    import torch

    torch.set_num_threads(1)
    count = stand_in_for_driver()
    stand_in_for_device()
    multiplexed, plain = passes(json.loads(setting))
    for _ in sys.stdin:
        # The processes take turns, and the first milliseconds after a wait are slow: they belong to no contender.
        woken_s = time.process_time()
        while time.process_time() - woken_s < _WARM_UP_S:
            plain()
        count[0] = 0
        forward_s, backward_s = multiplexed()
        num_launches = count[0]
        started_s = time.process_time()
        plain()
        plain_s = time.process_time() - started_s
        found = {"forward": forward_s, "backward": backward_s, "plain": plain_s, "launches": num_launches}
        print(json.dumps(found), flush=True)


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
    """Let layers take the kernels, and attention one call that computes nothing, also in the plain backbone."""
    import torch
    from transformers import AttentionInterface

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

    def plain_attention(module: Any, q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        return attention(*(x[0].transpose(0, 1) for x in (q, k, v))).unsqueeze(0), None

    AttentionInterface.register(_ATTENTION, plain_attention)
    lora_pass.runs_kernels = lambda device: True
    packed.varlen_support = lambda *arguments, **options: None
    packed.varlen_attention = attention


def passes(setting: dict[str, Any]) -> tuple[Callable[[], tuple[float, float]], Callable[[], None]]:
    """Return a pass of many tasks, which returns its seconds forward and backward, and one of the plain backbone."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.modeling.model import MultiTaskPeftModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=setting["layers"], pad_token_id=0, **sizes)
    dtype = getattr(torch, setting["dtype"])
    torch.manual_seed(0)
    adapter = LoraConfig(r=setting["rank"], lora_dropout=setting["dropout"], target_modules="all-linear")
    configs = {f"t{index}": adapter for index in range(setting["tasks"])}
    backbones = [LlamaForCausalLM(config).to(dtype).requires_grad_(False).train() for _ in range(2)]
    backbones[1].config._attn_implementation = _ATTENTION
    model = MultiTaskPeftModel(backbones[0], configs, seeds=dict.fromkeys(configs, 0), verify=False).train()
    rows = [{"task": name, "input_ids": [1 + number % 60, 2]} for number, name in enumerate(configs)]
    batch = ChunkPackingCollator()(rows)

    def precision() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def multiplexed() -> tuple[float, float]:
        started_s = time.process_time()
        with precision():
            losses = model(batch).losses
        middle_s = time.process_time()
        losses.sum().backward()
        return middle_s - started_s, time.process_time() - middle_s

    def plain() -> None:
        backbone = backbones[1].model
        with precision():
            # As below adapters, activations need gradients, and weights need none.
            inputs = backbone.embed_tokens(batch.input_ids).requires_grad_()
            out = backbone(inputs_embeds=inputs, position_ids=batch.position_ids, use_cache=False)
        out.last_hidden_state.sum().backward()

    return multiplexed, plain


if __name__ == "__main__":
    main()
