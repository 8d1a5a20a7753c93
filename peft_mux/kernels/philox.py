"""Counter-based dropout: a token gets the same mask wherever it is in the stream.

A draw is a pure function of (seed, place of the token in its task's global batch, column). Therefore dropout does not
depend on other tasks, micro-batching, device or recomputation (promise 1 of the design), and no mask is stored.

Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). One call yields
four 32-bit words, used as eight 16-bit draws for eight neighbouring columns.

Shape letters: L rows of one task, K columns of an activation.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

_MASK = 0xFFFFFFFF
_ROUNDS = 7  # the fewest that pass the BigCrush tests, by the paper
_DRAWS_PER_CALL = 8
_FACTOR_0, _FACTOR_2 = 0xD2511F53, 0xCD9E8D57
_SIGN = -(2**15)
"""The highest of 16 bits, as int16."""


class Window(NamedTuple):
    """The columns of an activation that this process holds; draws are the same as for the whole activation.

    Attributes:
        first: index of the first column in this process.
        num_columns: number of columns of the whole activation.
    """

    first: int
    num_columns: int


def hash_seed(*parts: object) -> int:
    """Return 64 well-mixed bits that depend on all parts."""
    # Not Python's `hash`, which has a different salt in each process: all processes need the same draws.
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw_seed(task_seed: int, step: int, module_name: str) -> int:
    """Return the 64-bit seed of one module's draws in one optimizer step of one task.

    The seed is the XOR of a part that changes with the step and a part that belongs to the module. On a GPU the first
    is in a table that is written once per step and the second is a launch constant, so that captured steps can be
    replayed.
    """
    return hash_seed(task_seed, step) ^ hash_seed(module_name)


def drop_threshold(probability: float) -> int:
    """Return how many of the 65,536 possible 16-bit draws drop an element; at least one keeps it."""
    return min(round(probability * 65536), 65535)


def keep_scale(probability: float) -> float:
    """Return the factor of kept elements, exact for the rounded probability."""
    return 65536.0 / (65536 - drop_threshold(probability))


def philox(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """Return four 32-bit words per counter.

    Args:
        seed: 64-bit key of the generator.
        counters: int64 `[...]`, one counter per call of the generator, each in [0, 2**32).

    Returns:
        int64 `[4, ...]` with values in [0, 2**32).
    """
    return torch.stack(_words(seed, counters)).bitwise_and_(_MASK)


def _words(seed: int, counters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four words of each counter in the lower halves of int64; the upper halves are undefined.

    Torch has no arithmetic on unsigned numbers. A product of 32 x 32 bits wraps around in int64 with the right bits;
    its sign affects only the upper half. With dropout, draws take a large part of a step, so nearly everything is
    computed in place, and values that are constant because of the three zeros in the first round are not computed.
    """
    keys = [((seed + n * 0x9E3779B9) & _MASK, ((seed >> 32) + n * 0xBB67AE85) & _MASK) for n in range(_ROUNDS)]
    word_3 = (counters & _MASK).mul_(_FACTOR_0)
    constant = keys[0][0] * _FACTOR_0
    word_1 = (word_3 >> 32).bitwise_xor_(keys[0][1]).bitwise_and_(_MASK).mul_(_FACTOR_2)
    word_0 = (word_1 >> 32).bitwise_xor_(keys[1][0]).bitwise_and_(_MASK)
    word_2 = word_3.bitwise_xor_((constant >> 32) ^ keys[1][1]).bitwise_and_(_MASK)
    word_3 = torch.full_like(word_2, constant & _MASK)
    for key_0, key_1 in keys[2:]:
        product_0, product_2 = word_0.mul_(_FACTOR_0), word_2.mul_(_FACTOR_2)
        word_0 = (product_2 >> 32).bitwise_xor_(word_1).bitwise_xor_(key_0).bitwise_and_(_MASK)
        word_2 = (product_0 >> 32).bitwise_xor_(word_3).bitwise_xor_(key_1).bitwise_and_(_MASK)
        word_1, word_3 = product_2, product_0
    return word_0, word_1, word_2, word_3


def keep_mask(
    seed: int, places: torch.Tensor, num_columns: int, probability: float, window: Window | None = None
) -> torch.Tensor:
    """Return which elements of `[L, num_columns]` are kept.

    Args:
        seed: 64-bit key of the draws, from `draw_seed`.
        places: int64 `[L]`, place of each row in its task's global batch.
        num_columns: width of the activation.
        probability: probability of dropping an element, in [0, 1).
        window: the position of these columns in a wider activation; by default they are the whole activation.

    Returns:
        bool `[L, num_columns]`, true where an element is kept.
    """
    if places.is_meta:  # meta tensors have no bits, and this skips hundreds of operations
        return places.new_empty((len(places), num_columns), dtype=torch.bool)
    return _draws(seed, places, num_columns, window or Window(0, num_columns)) >= drop_threshold(probability) + _SIGN


def uniform_rows(seed: int, places: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return numbers in (0, 1) for rows of a task's tokens, such as noise on activations.

    Args:
        seed: 64-bit key of the draws, from `draw_seed`.
        places: int64 `[L]`, place of each row in its task's global batch.
        num_columns: width of the activation.

    Returns:
        fp32 `[L, num_columns]`, each an odd multiple of 2**-17.
    """
    if places.is_meta:
        return places.new_empty((len(places), num_columns), dtype=torch.float32)
    return _draws(seed, places, num_columns, Window(0, num_columns)).float().add_(0.5 - _SIGN).div_(65536.0)


def _draws(seed: int, places: torch.Tensor, num_columns: int, window: Window) -> torch.Tensor:
    """Return draws for elements of `[L, num_columns]`: int16, each a number from 0 to 65,535 minus 2**15."""
    # Calls are counted over the whole activation, so that all processes use the same counters.
    calls_per_row = -(-window.num_columns // _DRAWS_PER_CALL)
    first_call, skipped = divmod(window.first, _DRAWS_PER_CALL)
    # The window may start within the eight columns of a call: draw whole calls and cut off the columns outside.
    last_call = -(-(window.first + num_columns) // _DRAWS_PER_CALL)
    columns = torch.arange(first_call, last_call, device=places.device)
    words = places.new_empty((len(places), len(columns), 4), dtype=torch.int32)
    for number, word in enumerate(_words(seed, places[:, None] * calls_per_row + columns)):
        words[..., number] = word
    # Neighbouring columns take the lower and then the upper half of words 0 to 3, as the kernels do.
    draws = words.view(torch.int16).view(len(places), len(columns) * _DRAWS_PER_CALL)
    # Torch has no arithmetic on unsigned numbers; flipping the sign bit makes signed comparison equivalent.
    return draws.bitwise_xor_(_SIGN)[:, skipped : skipped + num_columns]


def uniform(seed: int, num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Return numbers in (0, 1) for a matrix that belongs to a task, such as noise on its weights.

    Args:
        seed: 64-bit key of the draws, from `draw_seed`.
        num_rows: height of the matrix.
        num_columns: width of the matrix.
        device: device of the result; all devices give the same numbers.

    Returns:
        fp32 `[num_rows, num_columns]`, each an odd multiple of 2**-17, so that none is 0 or 1.
    """
    size = num_rows * num_columns
    num_calls = -(-size // _DRAWS_PER_CALL)
    draws = torch.empty(_DRAWS_PER_CALL, num_calls, device=device)
    if not draws.is_meta:
        words = philox(seed, torch.arange(num_calls, device=device))
        # In generation order, because no kernel needs to draw the same numbers.
        draws[:4], draws[4:] = words & 0xFFFF, words >> 16
    return draws.add_(0.5).div_(65536.0).flatten()[:size].view(num_rows, num_columns)


def dropout(
    x_LK: torch.Tensor, places: torch.Tensor, probability: float, seed: int, window: Window | None = None
) -> torch.Tensor:
    """Return `x` with elements dropped and the kept ones scaled; differentiable in `x`.

    Args:
        x_LK: `[L, K]` rows of one task.
        places: int64 `[L]`, place of each row in its task's global batch.
        probability: probability of dropping an element, in [0, 1).
        seed: 64-bit key of the draws, from `draw_seed`.
        window: the position of these columns in a wider activation; by default they are the whole activation.
    """
    return dropped(x_LK, keep_mask(seed, places, x_LK.shape[-1], probability, window), probability)


def dropped(x: torch.Tensor, kept: torch.Tensor, probability: float) -> torch.Tensor:
    """Return `x` with the elements that are kept scaled, and 0 for the others; differentiable in `x`.

    Args:
        x: of any shape.
        kept: bool, of the same shape, as returned by `keep_mask`.
        probability: probability with which an element was dropped.
    """
    # Selected with `where`, not multiplied, because 0 * NaN is NaN.
    return torch.where(kept, x * keep_scale(probability), 0.0)
