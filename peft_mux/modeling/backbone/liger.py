"""Liger's fused kernels in the frozen backbone: RMSNorm, rotary embeddings and gated MLPs.

Each of these is several elementwise operators in transformers, and reads and writes its activations several times; as
one kernel it does so once. Liger's losses are not used: the loss of each task is computed by blocks anyway.

Liger patches classes and functions of transformers for the whole process, and methods of single modules, which a
`deepcopy` would leave bound to the original. Here only the modules of one backbone change: each gets a subclass of its
class, and whatever else Liger replaced is put back. Before the first step the fused backbone is compared with the
plain one on the model itself, forward and backward.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from peft_mux.modeling.backbone.modules import telling_layers
from peft_mux.modeling.backbone.probe import path_of, probe_batch, tolerance_of, truncated_head
from peft_mux.modeling.stream import in_mode

_SIZES = ("sl", "n_rows", "rows_per_program")
"""Arguments of Liger's kernels that follow the number of tokens."""


def has_liger() -> bool:
    """Whether Liger can be imported."""
    return importlib.util.find_spec("liger_kernel") is not None


def fuse_layers(model: Any, switches: Mapping[str, bool] | None = None) -> str:
    """Let the modules of a backbone compute by Liger's kernels, if the results are those of its own code.

    Args:
        model: a `MultiTaskPeftModel` with at least one task and its weights, whole, on the device where it trains.
        switches: as `liger_kernel_config`, such as `{"rope": False}`; by default all that Liger has for the family.

    Returns:
        Why the backbone is unchanged, a clause; "" if it is fused.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    backbone = model.backbone
    if backbone.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger has no kernels for models of type {backbone.config.model_type}"
    plain = _probe(model)
    try:
        _patch(backbone, switches or {})
        fused = _probe(model)
    except Exception as error:  # a compiler, a driver, or a release of transformers that Liger does not know
        unfuse(backbone)
        return f"Liger fails on this model ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    for name, ours, theirs in zip(("logits", "gradients"), fused, plain, strict=True):
        difference = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
        # Written this way round, so that NaN is refused as well.
        if not difference <= tolerance_of(path_of(model)):
            unfuse(backbone)
            return f"with Liger its {name} differ by {difference:.1e} of their size"
    return ""


def unfuse(backbone: Any) -> None:
    """Let the modules of a backbone compute by their own code again."""
    for module in backbone.modules():
        if (plain := getattr(type(module), "_plain_class", None)) is not None:
            module.__class__ = plain


@contextmanager
def fused_without_data(backbone: Any, switches: Mapping[str, bool] | None) -> Iterator[None]:
    """Let a backbone without weights compute by Liger's kernels in the `with` block; they launch nothing there.

    Args:
        backbone: a model on the meta device; it stays plain if Liger has no kernels for it.
        switches: as for `fuse_layers`; `None` to leave it plain.
    """
    if switches is None:
        yield
        return
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_empty = any(isinstance(value, torch.Tensor) and value.is_meta for value in args)
        return None if is_empty else launch(function, *args, **kwargs)

    with suppress(Exception):  # `fuse_layers` will say why
        _patch(backbone, switches)
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch
        unfuse(backbone)


def is_fused(backbone: Any) -> bool:
    """Whether modules of a backbone compute by Liger's kernels."""
    return any(hasattr(type(module), "_plain_class") for module in backbone.modules())


def _patch(backbone: Any, switches: Mapping[str, bool]) -> None:
    """Give the modules of a backbone subclasses whose `forward` is Liger's."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _compile_once_for_all_sizes()
    # Of models with images it replaces `torch.nn.LayerNorm` too.
    names = [name for name in sys.modules if name.startswith(("transformers.", "torch.nn."))]
    files = {name: dict(vars(sys.modules[name])) for name in ["torch.nn", *names]}
    modules = list(backbone.modules())
    before = [dict(module.__dict__) for module in modules]
    functions: dict[Any, Any] = {}
    try:
        with _without_wrappers(backbone):
            _apply_liger_kernel_to_instance(
                backbone, **{"cross_entropy": False, "fused_linear_cross_entropy": False, **switches}
            )
    except Exception:  # some modules have methods of Liger already, which `unfuse` does not see
        for module, known in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(known)
        raise
    finally:
        for name, known in files.items():
            now = vars(sys.modules[name])
            for key in [key for key, value in known.items() if now.get(key) is not value]:
                if isinstance(known[key], FunctionType):
                    functions[known[key]] = now[key]
                now[key] = known[key]
    classes: dict[Any, type] = {}
    for module, known in zip(modules, before, strict=True):
        bound = {
            key: value.__func__
            for key, value in module.__dict__.items()
            if isinstance(value, MethodType) and known.get(key) is not value
        }
        for key in bound:
            if key in known:
                module.__dict__[key] = known[key]
            else:
                del module.__dict__[key]
        plain = type(module)
        if "forward" in known or hasattr(plain, "_plain_class"):  # adapted in place, or fused already
            continue
        if "in_place" in module.__dict__:
            module.in_place = False  # gradients of a norm may be read by others as well
        forward = bound.get("forward") or _calling(plain.forward, functions)
        if forward is not None:
            key = plain, forward.__code__
            if key not in classes:
                own = {"forward": forward, "_plain_class": plain, "__module__": plain.__module__}
                classes[key] = type(plain.__name__, (plain,), own)
            module.__class__ = classes[key]


def _compile_once_for_all_sizes() -> None:
    """Keep Triton from compiling Liger's kernels again, in some later step, for a number of tokens that 16 divides."""
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("liger_kernel.ops.") else ():
            for param in kernel.params if isinstance(kernel, JITFunction) else ():
                param.do_not_specialize |= param.name in _SIZES


@contextmanager
def _without_wrappers(backbone: Any) -> Iterator[None]:
    """Let a backbone have its own modules in place of PEFT's, which call them, in the `with` block."""
    places = []
    for parent in list(backbone.modules()):
        for name, child in parent._modules.items():
            own = child
            while isinstance(own, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                own = own.get_base_layer() if isinstance(own, BaseTunerLayer) else own.original_module
            if own is not child:
                places.append((parent, name, child))
                parent._modules[name] = own
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _calling(function: Callable[..., Any], functions: Mapping[Any, Any]) -> Any:
    """Return a copy of a function that calls other functions of its file; `None` if it calls none of those replaced."""
    inner: Any = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    found = {name: inner.__globals__.get(name) for name in (code.co_names if code else ())}
    own = {
        name: functions[value]
        for name, value in found.items()
        if isinstance(value, FunctionType) and value in functions
    }
    if not own:
        return None
    copied = FunctionType(
        inner.__code__, {**inner.__globals__, **own}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copied.__kwdefaults__ = inner.__kwdefaults__
    return copied


def _probe(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of the frozen backbone for some made-up tokens, and gradients of their embeddings, in fp32."""
    backbone = model.backbone
    ids = probe_batch(model, next(iter(model.tasks))).input_ids
    embeddings = backbone.get_input_embeddings()(ids).detach().requires_grad_()
    evaluating = in_mode(model, training=False)
    with telling_layers(backbone), truncated_head(backbone, 256), evaluating, model.disable_adapter():
        logits = backbone(inputs_embeds=embeddings, use_cache=False).logits.float()
        (gradients,) = torch.autograd.grad(logits.square().mean(), embeddings)
    return logits.detach(), gradients.float()
