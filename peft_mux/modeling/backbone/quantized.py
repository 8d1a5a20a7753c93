"""Backbones whose linear layers bitsandbytes holds in 4 or 8 bits.

The library's own kernels compute such a layer and its input gradient; adapters add to it on their own rows
(`MultiplexedLinear.alone`). What would break a promise is refused by name:

* 8-bit layers with an outlier threshold: a feature that is large in one row is computed in another precision for all
  rows of the call, so that one task changes its neighbours. With `llm_int8_threshold=0.0` every row is independent.
* 4-bit layers that bitsandbytes has repacked for inference on CPUs (AVX512-BF16), as it does by default in evaluation
  mode: that path has no input gradient and rounds the scales. `prepare_quantized` prevents it.
* quantised heads, whose weights the fused loss reads, and other libraries' quantisation.

bitsandbytes is imported only if something is quantised.

Shape letters: T rows, D input features, K output features.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from peft_mux.errors import ConfigError, Fault, UnsupportedModelError, closest, raise_faults
from peft_mux.modeling.backbone.modules import HEAD_NAMES, modules_below_adapters

_METHOD = "bitsandbytes"
_NESTED_BLOCK = 256
"""Scales that share a scale of their own under double quantisation; fixed by bitsandbytes."""


def bits_of(module: nn.Module) -> int | None:
    """Return 4 or 8 for a linear layer of bitsandbytes, `None` for any other module."""
    library = sys.modules.get(_METHOD)  # none of its layers exists before it is imported
    if library is None:
        return None
    if isinstance(module, library.nn.Linear4bit):
        return 4
    return 8 if isinstance(module, library.nn.Linear8bitLt) else None


def quantized_layers(backbone: nn.Module) -> Iterator[tuple[str, Any, int]]:
    """Yield name, layer and bits of every layer that bitsandbytes holds, adapters injected or not."""
    for name, module in modules_below_adapters(backbone):
        bits = bits_of(module)
        if bits is not None:
            yield f"{name}.".replace(".base_layer.", ".").removesuffix("."), module, bits


# ------------------------------------------------------------------ computing


def base_output(layer: nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the output `[..., K]` for `x [..., D]` of a frozen layer that is no plain linear one, by its own forward.

    Raises:
        UnsupportedModelError: if the layer loses the gradient of `x`, which would stop the layers below from training.
    """
    y = layer(x)
    if torch.is_grad_enabled() and x.requires_grad and not y.requires_grad:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) must be a frozen layer that autograd passes through, but its kernel "
            "returns no gradient for its input. Load the backbone again, and run it through peft_mux only."
        )
    return y


# -------------------------------------------------------------------- checking


def prepare_quantized(backbone: Any) -> None:
    """Check a loaded backbone, and keep bitsandbytes from repacking its 4-bit weights in evaluation mode.

    Does nothing to a backbone that is not quantised; may be called again, with adapters or without.

    Raises:
        ConfigError: naming every kind of layer that would change results.
    """
    method = quantization_method(getattr(backbone, "config", None))
    if method not in (None, _METHOD):
        raise_faults([_method_fault("model", method)])
    # Every module of the output head or the classification head, with the name of that head.
    output = backbone.get_output_embeddings() if hasattr(backbone, "get_output_embeddings") else None
    inside = set() if output is None else set(output.modules())
    roots = {module: name.split(".")[0] for name, module in backbone.named_modules()}
    heads = {module: root for module, root in roots.items() if root in HEAD_NAMES or module in inside}
    faults: dict[str, Fault] = {}
    for name, layer, bits in quantized_layers(backbone):
        where = f"model.{name}"
        if layer in heads:
            faults["head"] = Fault(
                where,
                f"{bits} bits",
                "in full precision, because it is the head, which the loss reads",
                f'Add "{heads[layer]}" to llm_int8_skip_modules.',
            )
        if bits == 8 and layer.state.threshold > 0.0:
            faults["threshold"] = _threshold_fault(where, layer.state.threshold, _LOAD_FIX)
        if bits == 8 and layer.state.has_fp16_weights:
            faults["fp16"] = _fp16_fault(where)
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            faults["packed"] = Fault(
                where,
                "weights that bitsandbytes has repacked for inference on this CPU",
                "4-bit weights as loaded, which have input gradients",
                "Load the backbone again, and do not run it in evaluation mode before.",
            )
    raise_faults(list(faults.values()))
    for _, layer, bits in quantized_layers(backbone):
        if bits == 4:
            layer.support_avx512bf16_for_cpu = False


_LOAD_FIX = "Load with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)."
_STORED_FIX = "Set it to 0.0 in quantization_config of the model's config.json; the stored weights stay as they are."


def _threshold_fault(where: str, threshold: float, fix: str) -> Fault:
    allowed = "0.0, because outliers of one task would change the precision of all rows"
    return Fault(f"llm_int8_threshold of {where}", str(threshold), allowed, fix)


def _fp16_fault(where: str) -> Fault:
    allowed = "False, because a frozen backbone needs no 16-bit copy of its weights"
    return Fault(f"llm_int8_has_fp16_weight of {where}", "True", allowed)


def _method_fault(where: str, method: str | None) -> Fault:
    fix = "Load the weights in full precision with a BitsAndBytesConfig."
    return Fault(where, str(method), f"{_METHOD} (4 or 8 bits), or no quantisation", fix)


# ---------------------------------------------------------------------- options


def quantization_method(config: Any) -> str | None:
    """Return the name of the library that a model configuration says it was quantised with, or `None`."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", None)
    method = getattr(method, "value", method)
    if method is None and isinstance(given, Mapping) and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return _METHOD  # files of early releases name none
    return "an unnamed method" if method is None else str(method)


def quantization_of(config: Any, model_init_kwargs: Mapping[str, Any]) -> Any:
    """Return the `BitsAndBytesConfig` under which a hub id or folder will be loaded, or `None` for none.

    Args:
        config: the configuration of the model, which may be stored quantised.
        model_init_kwargs: options of `from_pretrained`; their `quantization_config` is a `BitsAndBytesConfig` or,
            from a file, a mapping.

    Raises:
        ConfigError: naming every option that would change results or does not exist.
    """
    where, given = "model_init_kwargs.quantization_config", model_init_kwargs.get("quantization_config")
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        where, method = "model", quantization_method(config)
        if given is not None:
            raise ConfigError(f"{where} must be empty for weights that {method} has already quantised.")
        if method != _METHOD:
            raise_faults([_method_fault(where, method)])
        given = stored
    if given is None:
        return None
    _import_bitsandbytes(where)
    from transformers import BitsAndBytesConfig

    options = given
    if not isinstance(given, BitsAndBytesConfig):
        if not isinstance(given, Mapping):
            got = type(given).__name__
            raise ConfigError(f"{where} must be a BitsAndBytesConfig, or a mapping of one, got {got}.")
        known = {key.removeprefix("_") for key in BitsAndBytesConfig().to_dict()}
        odd = sorted(set(given) - known)
        if odd and stored is None:  # what another release has stored is transformers' to read
            allowed = f"one of {', '.join(sorted(known))}"
            raise_faults([Fault(f"{where}.{key}", "an unknown option", allowed, closest(key, known)) for key in odd])
        wanted = {key: value for key, value in given.items() if key in known and key != "quant_method"}
        try:
            options = BitsAndBytesConfig(**wanted)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where} must be options that transformers accepts: {error}") from error
    faults = []
    if not (options.load_in_4bit or options.load_in_8bit):
        faults.append(Fault(where, "neither", "set with load_in_4bit or load_in_8bit"))
    elif options.load_in_8bit and options.llm_int8_threshold > 0.0:
        fix = _LOAD_FIX if stored is None else _STORED_FIX
        faults.append(_threshold_fault(f"{where}.llm_int8_threshold", options.llm_int8_threshold, fix))
    if options.load_in_8bit and options.llm_int8_has_fp16_weight:
        faults.append(_fp16_fault(f"{where}.llm_int8_has_fp16_weight"))
    raise_faults(faults)
    return options


def _import_bitsandbytes(where: str) -> Any:
    """Return the library; transformers, too, asks for it as soon as options are written down."""
    try:
        return importlib.import_module(_METHOD)
    except Exception as error:  # a wheel for another platform raises what its loader raises
        raise ConfigError(
            f"{where} asks for quantised weights, but bitsandbytes cannot be imported ({error}). Run pip install "
            "bitsandbytes, or load weights that are not quantised."
        ) from error


def require_bitsandbytes(options: Any, device: torch.device) -> None:
    """Check that bitsandbytes can compute a layer and its input gradient on a device, by doing it once.

    Args:
        options: the `BitsAndBytesConfig` of the backbone.
        device: the device on which the backbone will live.

    Raises:
        ConfigError: saying what is missing and what to do.
    """
    bits = 4 if options.load_in_4bit else 8
    where, library = f"model has {bits}-bit weights", _import_bitsandbytes("model")
    width = 64
    x = torch.ones(2, width, device=device, requires_grad=True)
    try:
        if bits == 4:
            layer = library.nn.Linear4bit(
                width,
                width,
                compute_dtype=options.bnb_4bit_compute_dtype,
                compress_statistics=options.bnb_4bit_use_double_quant,
                quant_type=options.bnb_4bit_quant_type,
                quant_storage=options.bnb_4bit_quant_storage,
            )
        else:
            layer = library.nn.Linear8bitLt(width, width, has_fp16_weights=False, threshold=options.llm_int8_threshold)
        # Fixed numbers: this must not draw from the global generator.
        layer.weight.data.copy_(torch.linspace(-1.0, 1.0, width * width).view(width, width))
        # Moving to the device is what quantises. The caller may have turned gradients off.
        layer = layer.requires_grad_(False).to(device)
        with torch.enable_grad():
            layer(x).sum().backward()
    except Exception as error:  # the library's own kinds, by backend
        raise ConfigError(
            f"{where}, which bitsandbytes {library.__version__} cannot compute on {device} ({error}). Install a "
            "release for this platform, or load weights that are not quantised."
        ) from error
    if x.grad is None or not bool(torch.isfinite(x.grad).all()):
        raise ConfigError(
            f"{where}, for which bitsandbytes {library.__version__} gives no input gradients on {device}. Install a "
            "newer release, or load weights that are not quantised."
        )


# ------------------------------------------------------- describing and counting


def quantize_description(backbone: Any, options: Any) -> None:
    """Put the layers of bitsandbytes that loading makes into a model on the meta device.

    Args:
        backbone: a model on the meta device, with a configuration of its own, which is written into.
        options: the `BitsAndBytesConfig` of the backbone.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(options, pre_quantized=False)
    quantizer.preprocess_model(model=backbone, device_map=None)
    quantizer.postprocess_model(backbone)
    backbone.hf_quantizer = quantizer  # as from_pretrained leaves it: Trainer asks it whether it may be trained on


def weight_bytes(layer: Any, bits: int) -> int:
    """Return the bytes of a quantised weight with its scales; the same before loading and after.

    Args:
        layer: a layer of bitsandbytes, possibly on the meta device.
        bits: bits of each weight, 4 or 8.
    """
    size = layer.in_features * layer.out_features
    if bits == 8:
        return size + 4 * layer.out_features
    blocks = math.ceil(size / layer.weight.blocksize)
    # A code book of 16 values in fp32.
    codes = 16 * 4
    if not layer.weight.compress_statistics:
        return math.ceil(size / 2) + 4 * blocks + codes
    # Scales of one byte, fp32 scales and an offset for these, and a code book of 256 for them.
    return math.ceil(size / 2) + blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) + 4 + 256 * 4 + codes


def scales(layer: Any, bits: int) -> tuple[str, list[torch.Tensor]]:
    """Return what identifies a quantised layer in addition to its integers: the format in words, and its scales.

    Args:
        layer: a layer of bitsandbytes, with weights.
        bits: bits of each weight, 4 or 8.
    """
    if bits == 8:
        scale = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
        return "int8", [] if scale is None else [scale]
    state = layer.weight.quant_state
    tensors = [state.absmax, *([state.offset, state.state2.absmax] if state.nested else [])]
    return f"{state.quant_type} {state.blocksize} {state.nested}", tensors
