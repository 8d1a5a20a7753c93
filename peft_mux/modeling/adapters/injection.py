"""When the adapter of a task is a copy of another one's, but for its id, its seed and its scaling."""

# MERGED: What is drawn at random for an adapter, so that those of other seeds need no injection of their own.
# MERGED: Adapters that are out of sight: of walks over modules while others come, and of what one task alone is asked.
# MERGED: The backbone's own dropout, with draws that belong to each task.
# MERGED: Attaches multiplexed forwards to the layers that PEFT injected, and takes them out again (M §3.2).
# MERGED: What a backbone was like before adapters came, and the way back to it.
# MERGED: PEFT's injection of an adapter: checks before it, its randomness, and its refusals.

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.checks import peft_config_faults, target_faults
from peft_mux.modeling.adapters.kind import KINDS, MultiplexedForward, kind_of, kind_of_layer
from peft_mux.modeling.adapters.own import (
    MultiplexedBias,
    MultiplexedCopies,
    MultiplexedTokenRows,
    biases_unsaid,
    claim_faults,
    forget_biases,
    own_biases,
)
from peft_mux.modeling.backbone.modules import head_kind_for, head_kind_of, modules_around_adapters
from peft_mux.modeling.stream import Stream
from peft_mux.storage import check_task_names, name_fault

_ENTERED = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
)
"""Fields of a `LoraConfig` that decide entries of tuned layers and nothing else."""

_DRAWN = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that draw numbers, and leave the backbone's weights alone."""


def can_be_copied(config: PeftConfig) -> bool:
    """Whether all that PEFT makes of a configuration are entries of tuned layers under the adapter's id.

    Then the adapter of a second task with this configuration and seed is a copy of the first one's
    (`HiddenAdapters.copy`): what PEFT would give it has the same shapes and numbers.

    Args:
        config: the configuration, as PEFT completed it; with any field beside those of plain LoRA the answer is no.
    """
    if type(config) is not LoraConfig or config.init_lora_weights not in _DRAWN:
        return False
    plain, own = LoraConfig(), vars(config)
    return all(own[field] == getattr(plain, field) for field in own.keys() & vars(plain).keys() - {*_ENTERED})


def are_drawn_alike(given: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether PEFT makes adapters of the same shapes of two configurations, drawn alike from one seed.

    Args:
        given: the fields of one, as it was given; `can_be_copied` holds for it.
        other: those of the other.
    """
    # What a pattern says of single layers stands against what holds for all others.
    free = set() if given["alpha_pattern"] else {"lora_alpha"}
    return given.keys() == other.keys() and all(given[field] == other[field] for field in given.keys() - free)


def rescale(layers: Iterable[nn.Module], adapter: str, own: Any, given: Any) -> None:
    """Let the copy of an adapter be scaled as its own configuration has it, as PEFT's `update_layer` would.

    Args:
        layers: the tuned layers of the model; some hold the adapter.
        adapter: internal id of the copy.
        own: its configuration, still that of the adapter of which it is a copy; brought up to date.
        given: the configuration that its task was given.
    """
    if own.lora_alpha == given.lora_alpha:
        return
    own.lora_alpha = given.lora_alpha
    for layer in (one for one in layers if isinstance(one, LoraLayer) and adapter in one.scaling):
        rank = layer.r[adapter]
        layer.lora_alpha[adapter] = given.lora_alpha
        layer.scaling[adapter] = given.lora_alpha / (math.sqrt(rank) if layer.use_rslora[adapter] else rank)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, as an owner who trains alone would, and put it back afterwards."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


class _Call(NamedTuple):
    """One call that draws: into a tensor of this form, where it has one, else into one of its own."""

    function: Any
    into: tuple[torch.Size, torch.dtype] | None
    args: Sequence[Any]
    options: Mapping[str, Any]


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write a call down if it draws, and make it."""
        options = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            into = (args[0].shape, args[0].dtype) if args and isinstance(args[0], torch.Tensor) else None
            self._calls.append(_Call(func, into, args[into is not None :], options))
        return func(*args, **options)


class Draws:
    """The random numbers that an adapter was made of, in their order.

    PEFT draws more than it keeps (a linear layer's own values, then those of LoRA), so what another seed gives an
    adapter of the same shapes is found by repeating all that it drew.

    Args:
        seed: that they were drawn from.
    """

    def __init__(self, seed: int) -> None:
        """Know nothing yet."""
        self.seed = seed
        self._calls: list[_Call] = []
        self._are_all: bool | None = None
        self._kept: dict[int, tuple[nn.Parameter, torch.dtype]] = {}
        """By number of the call: the parameter that holds what it drew, rounded to this dtype."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down what is drawn in the block."""
        with _Recorder(self._calls):
            yield

    def make(self, parameters: Sequence[nn.Parameter], backbone_dtype: torch.dtype) -> bool:
        """Whether parameters hold nothing but these numbers and zeros; proven by drawing them once more.

        Args:
            parameters: those of the adapter, as drawn.
            backbone_dtype: that of the backbone, to which PEFT may have rounded them.
        """
        if self._are_all is None:
            drawn = [parameter for parameter in parameters if parameter.any()]
            self._find(drawn, backbone_dtype)
            known = {id(parameter) for parameter, _ in self._kept.values()}
            self._are_all = all(id(parameter) in known for parameter in drawn)
        return self._are_all

    def _find(self, parameters: Sequence[nn.Parameter], backbone_dtype: torch.dtype) -> None:
        # Modules are drawn in the order in which they stand in the model: of each shape, one after another.
        waiting: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            waiting.setdefault(parameter.shape, []).append(parameter)
        for number, values in self._drawn(self.seed):
            own = waiting.get(values.shape, [])
            for dtype in (values.dtype, backbone_dtype) if own else ():
                if torch.equal(values.to(dtype).to(own[-1]), own[-1]):
                    self._kept[number] = own.pop(), dtype
                    break

    @torch.no_grad()
    def repeat(self, seed: int, copies: Mapping[int, nn.Parameter]) -> None:
        """Draw from another seed.

        Args:
            seed: the other.
            copies: what to draw into, by `id` of the parameters that were drawn at first.
        """
        for number, values in self._drawn(seed):
            if number in self._kept:
                parameter, dtype = self._kept[number]
                copies[id(parameter)].copy_(values.to(dtype))

    @torch.no_grad()
    def _drawn(self, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Give the number of each call, and what it draws, which is true until the next."""
        forms = [call.into for call in self._calls if call.into is not None]
        longest = max((shape.numel() for shape, _ in forms), default=0)
        # On the CPU, where PEFT draws; all are drawn into the same memory.
        memory = {dtype: torch.empty(longest, dtype=dtype) for dtype in {dtype for _, dtype in forms}}
        with seeded(seed):
            for number, (function, into, args, options) in enumerate(self._calls):
                given = () if into is None else (memory[into[1]][: into[0].numel()].view(into[0]),)
                yield number, function(*given, *args, **options)


_ENTRIES = ("_modules", "_parameters", "_keys")
"""Where torch's dictionaries of modules and parameters hold what is in them."""


class HiddenAdapters:
    """Takes the adapters out of all tuned layers of a model, and puts them back in their order.

    PEFT goes through all modules many times for each adapter that it adds, those of other adapters included, so that
    many tasks would take time by the square of their number; and it has nothing to do with those. What a layer keeps
    adapters in stays its attribute, empty, but no walk over modules meets it. Heads of tasks stay.

    Args:
        model: the model, adapters injected.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hide nothing yet."""
        self._model = model
        self._entries: dict[nn.Module, dict[str, dict[str, Any]]] = {}
        self._order: dict[nn.Module, list[str]] = {}

    @property
    def layers(self) -> list[nn.Module]:
        """The layers whose adapters are hidden."""
        return list(self._order)

    def hide(self) -> None:
        """Hide all adapters, those that have come since too."""
        for layer in [one for _, one in modules_around_adapters(self._model) if isinstance(one, BaseTunerLayer)]:
            self._order[layer] = list(layer._modules)
            for name, child in list(layer._modules.items()):
                if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                    self._take_entries(child)
                    # An attribute as any other: PEFT's layers find it as before.
                    vars(layer)[name] = layer._modules.pop(name)

    def _take_entries(self, child: nn.Module) -> None:
        own = self._entries.setdefault(child, {field: {} for field in _ENTRIES if field in child.__dict__})
        for field, entries in own.items():
            entries.update(child.__dict__[field])
            # A `ParameterDict` keeps its keys beside its parameters, so both are emptied.
            child.__dict__[field].clear()

    def copy(self, adapter: str, new: str) -> dict[int, nn.Parameter]:
        """Enter an adapter into all layers that hold another one, alike to it, and hidden as it is.

        Args:
            adapter: internal id of an adapter that is hidden.
            new: that of the new one.

        Returns:
            its parameters, by `id` of those that they are alike to; they share memory until they are laid out.
        """
        parameters: dict[int, nn.Parameter] = {}
        for own in self._entries.values():
            for entries in own.values():
                if adapter in entries:
                    entries[new] = _copied(entries[adapter], parameters)
        for layer in self._order:
            for value in vars(layer).values():
                if type(value) is dict and adapter in value:  # ranks, scalings and the like, by adapter
                    value[new] = _copied(value[adapter], parameters)
        return parameters

    def show_new(self) -> None:
        """Let walks over modules meet the adapters that have come since they were hidden, and no others."""
        for layer, order in self._order.items():
            now = dict(layer._modules)
            now |= {name: layer.__dict__.pop(name) for name in order if name in layer.__dict__}
            layer._modules.clear()
            layer._modules.update({name: now.pop(name) for name in order if name in now} | now)
        self._order.clear()

    def show_all(self) -> None:
        """Put everything back."""
        self.show_new()
        for child, own in self._entries.items():
            for field, entries in own.items():
                entries.update(child.__dict__[field])
                child.__dict__[field].update(entries)
                # Entries of before come first, whatever was added meanwhile.
                for key in entries:
                    child.__dict__[field][key] = child.__dict__[field].pop(key)
        self._entries.clear()


def _copied(entry: Any, parameters: dict[int, nn.Parameter]) -> Any:
    """Return what a layer shall hold of a new adapter: alike, of parameters that lie where those of the other lie."""
    if isinstance(entry, nn.Parameter):
        if id(entry) not in parameters:
            values = torch.empty_like(entry) if entry.is_meta else entry.detach()
            parameters[id(entry)] = nn.Parameter(values, requires_grad=entry.requires_grad)
        return parameters[id(entry)]
    if not isinstance(entry, nn.Module):
        return copy.copy(entry)
    new = object.__new__(type(entry))
    # Hooks and buffers lie in dictionaries of the module's own; `copy.copy` of ordered ones takes many times as long.
    new.__dict__.update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(entry).items()})
    for entries in (new._parameters, new._modules):
        entries.update({key: _copied(value, parameters) for key, value in entries.items()})
    return new


@contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[HiddenAdapters]:
    """Hide the adapters of all tuned layers of a model for the time of the block.

    Args:
        model: the model, adapters injected.

    Yields:
        what hides those that have come since, too, or shows them alone.
    """
    hidden = HiddenAdapters(model)
    hidden.hide()
    try:
        yield hidden
    finally:
        hidden.show_all()


@contextmanager
def only_adapter(model: nn.Module, adapter: str) -> Iterator[None]:
    """Take the adapters of all others out of all tuned layers for the time of the block, in which none is added.

    As `hidden_adapters`, and for its reason.

    Args:
        model: a model with adapters.
        adapter: internal id of the task whose adapter stays.
    """
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for layer in [one for _, one in modules_around_adapters(model) if isinstance(one, BaseTunerLayer)]:
        for child in layer.children():
            if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                for entries in [child.__dict__[field] for field in _ENTRIES if field in child.__dict__]:
                    taken.append((entries, dict(entries)))
                    for key in taken[-1][1].keys() - {adapter}:
                        del entries[key]
    try:
        yield
    finally:
        # The last first, as tied layers share what they keep, which was taken twice then.
        for entries, before in reversed(taken):
            entries.clear()  # so that all are in their order again
            entries.update(before)


class MultiplexedDropout(MultiplexedForward):
    """The backbone's own dropout with draws that belong to each task, so that neighbours never shift them."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, dropped in training."""
        dropout: Any = self.module
        if not dropout.training or dropout.p == 0.0:
            return x
        x_TK = self.rows(x, x.shape[-1])
        # Task by task: seeds differ, and slices keep one task's NaN from the others.
        parts = [
            philox.dropout(
                x_NK, self.stream.places[segment.start : segment.end], dropout.p, segment.draw_seed(self.name)
            )
            for segment, x_NK in zip(self.stream.segments, self.by_segment(x_TK), strict=True)
        ]
        return torch.cat(parts).view_as(x)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass can be captured while this module drops: each task draws on its own rows."""
        drops = self.module.training and getattr(self.module, "p", 0.0) > 0.0
        return f"the backbone's own dropout ({self.name}) draws for each task on its own" if drops else None


def attach(model: nn.Module, stream: Stream) -> None:
    """Multiplex every adapted layer and every dropout layer of a PEFT-injected model that is not yet so.

    Args:
        model: the backbone, into which PEFT has injected tuner layers.
        stream: what the layers will ask which rows are whose.
    """
    drawing = ""  # how names begin within the layer met last that draws its dropout by itself
    # Of adapters only those of layers that do not, as there are several modules a layer and task.
    for name, module in [*modules_around_adapters(model, passed_over=_draws_itself)]:
        kind = kind_of_layer(module)
        is_inside = bool(drawing) and name.startswith(drawing)
        if kind is not None and kind.draws_itself and not is_inside:
            drawing = f"{name}."
        # Attached before, or the backbone's own head, of which tasks train copies.
        forward = module.__dict__.get("forward")
        if isinstance(forward, MultiplexedBias) and _adds_own_biases(model, name):
            del module.forward  # another task's adapter has come around it since
        if isinstance(forward, MultiplexedForward) or ".original_module" in name:
            continue
        if isinstance(module, ModulesToSaveWrapper):
            module.forward = MultiplexedCopies(module, name, stream)
        elif isinstance(module, TrainableTokensWrapper):
            module.forward = MultiplexedTokenRows(module, name, stream)
        elif kind is not None:
            forward = kind.attach(module, name, stream)
            if forward is not None:
                # On the instance: classes and names of parameters stay PEFT's and transformers'.
                module.forward = forward
        elif own_biases(module) and not _adds_own_biases(model, name):
            module.forward = MultiplexedBias(module, name, stream)
        elif isinstance(module, nn.Dropout) and not is_inside:
            module.forward = MultiplexedDropout(module, name, stream)
    for kind in KINDS.values():
        kind.arrange(model, stream)


def _draws_itself(layer: nn.Module) -> bool:
    kind = kind_of_layer(layer)
    return kind is not None and kind.draws_itself


def _adds_own_biases(model: nn.Module, name: str) -> bool:
    """Whether the layer around a frozen one adds what tasks have of its bias."""
    around = model.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
    return around is not None and getattr(around.__dict__.get("forward"), "adds_own_biases", False)


def detach(model: nn.Module) -> None:
    """Take adapters and multiplexed forwards out again, so that the model is as it was before PEFT's injection."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), MultiplexedForward):
            del module.forward
    inside = ""
    # A list, as modules are replaced on the way.
    for name, module in list(model.named_modules()):
        # A layer of another type, or task, within one that is gone by now.
        if (inside and name.startswith(inside)) or name.endswith(".token_adapter"):
            continue
        original = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else None
        if isinstance(module, BaseTunerLayer):
            # The outermost of several around one module leads to the frozen layer; those within go with it.
            original, inside = module.get_base_layer(), f"{name}."
        if original is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, original)
    forget_biases(model)
    # By this attribute PEFT takes a model for one that has adapters.
    model.__dict__.pop("peft_config", None)


def train_only(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let the given parameters of a model get gradients, and no others."""
    own = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in own)


class Origin:
    """What a backbone was like before adapters came.

    Args:
        backbone: the transformers model, as its owner gave it.
    """

    def __init__(self, backbone: Any) -> None:
        """Write down which parameters had gradients, and whether it trained."""
        self._flags = {name: parameter.requires_grad for name, parameter in backbone.named_parameters()}
        self._training = backbone.training

    def restore(self, backbone: Any) -> None:
        """Take the adapters out of the backbone, and let it be as it was."""
        detach(backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(self._flags.get(name, True))
        # Older releases of transformers have the second name alone, newer ones warn of it.
        old = None if hasattr(type(backbone), "is_activation_checkpointing") else "is_gradient_checkpointing"
        if getattr(backbone, old or "is_activation_checkpointing", False):
            disable = getattr(backbone, "activation_checkpointing_disable", None)
            (disable or backbone.gradient_checkpointing_disable)()
        backbone.train(self._training)


@contextmanager
def as_it_was(backbone: Any, origin: Origin) -> Iterator[None]:
    """Give the caller's backbone back without adapters where the construction around it fails."""
    try:
        yield
    except Exception:
        origin.restore(backbone)
        raise


_REFUSALS = (
    *(TypeError, ValueError, AttributeError, LookupError, ImportError, re.error),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""Errors that PEFT, and torch below it, raise for values that they cannot use."""


def check_configs(
    peft_configs: Mapping[str, PeftConfig], backbone: Any, held: Mapping[str, PeftConfig] | None = None
) -> None:
    """Check the adapters of new tasks: names, fields, and targets against the backbone.

    Args:
        peft_configs: the `PeftConfig` of each new task, by the task's name.
        backbone: the transformers model that they shall adapt.
        held: configurations of the tasks that are there already, by name; none by default.

    Raises:
        ConfigError: naming every fault of every task.
    """
    faults: list[Fault] = []
    sound: list[Any] = []  # what has fitted the backbone is not held against it again, as that goes through all modules
    for name, config in peft_configs.items():
        fault = name_fault(name, f"tasks.{name}.name")
        faults += [fault] if fault else []
        own = peft_config_faults(config, f"tasks.{name}")
        if not own and (fields := (type(config), vars(config))) not in sound:
            own = target_faults(config, backbone, f"tasks.{name}") + _task_type_faults(config, backbone, name)
            sound += [] if own else [fields]
        faults += own
    held = held or {}
    raise_faults(faults or claim_faults(peft_configs, held, backbone))
    check_task_names(peft_configs, tuple(held))


def _task_type_faults(config: PeftConfig, backbone: Any, name: str) -> list[Fault]:
    kind, wanted = head_kind_of(backbone), head_kind_for(config.task_type)
    if kind == wanted:
        return []
    where, got = f"tasks.{name}.peft_config.task_type", str(getattr(config.task_type, "value", config.task_type))
    allowed = " or ".join(str(task_type) for task_type in kind.task_types)
    return [Fault(where, got, f"{allowed}, as the backbone is a {type(backbone).__name__}", wanted.advice)]


def own_copy(config: PeftConfig, backbone: Any) -> PeftConfig:
    """Return a copy that PEFT may write into, completed as `get_peft_model` completes it."""
    # PEFT writes into what it is given, and one configuration may serve several tasks.
    own = copy.deepcopy(config)
    own.base_model_name_or_path = getattr(backbone, "name_or_path", None)
    own.inference_mode = False
    kind_of(own).complete(own, backbone)
    return own


@contextmanager
def without_renaming_warnings() -> Iterator[None]:
    """Let PEFT read an older name of transformers without a word: no user of either can do anything about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


@contextmanager
def injecting(
    name: str, config: PeftConfig, seed: int, held: Mapping[str, PeftConfig] | None = None
) -> Iterator[Draws]:
    """Surround PEFT's injection of a task's adapter: its seed, its kind's own needs, and errors that name the task.

    Args:
        name: the task's name.
        config: the copy of its configuration that PEFT is given.
        seed: fixes the initial weights of the adapter.
        held: configurations of the adapters that are there already.

    Yields:
        what is drawn, where other adapters may be copies of this one.
    """
    unsaid = biases_unsaid([config, *(held or {}).values()])
    draws = Draws(seed)
    recorded = draws.recorded() if can_be_copied(config) else nullcontext()
    with seeded(seed), peft_refusals(name), kind_of(config).injecting(), unsaid, recorded:
        yield draws


@contextmanager
def peft_refusals(name: str) -> Iterator[None]:
    """Turn what PEFT itself refuses into an error that names the task."""
    try:
        yield
    except torch.OutOfMemoryError:  # a `RuntimeError` that no configuration is to blame for
        raise
    # What a configuration of another type than it checks leads to, or a pattern that it makes of several fields.
    except _REFUSALS as error:
        raise ConfigError(f"tasks.{name}.peft_config: PEFT refuses it: {error}") from error
