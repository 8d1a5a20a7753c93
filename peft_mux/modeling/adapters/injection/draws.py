"""What is drawn at random for an adapter, so that those of other seeds need no injection of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


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
