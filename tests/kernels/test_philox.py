"""Counter-based dropout: published words, honest rates, and draws that belong to a token and not to its position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.kernels import philox

PROPERTY = settings(deadline=None, max_examples=60)
PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Philox-4x32 as the paper writes it, in Python's own integers, which cannot overflow."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


# The known answers that are published with the generator (kat_vectors of Random123).
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "words"),
    [
        (7, (0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, PI_COUNTER, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_the_plain_generator_gives_the_published_words(
    rounds: int, counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert plain_philox(counter, key, rounds) == words


# Where a product could overflow, and anything else.
COUNTERS = st.sampled_from([0, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, 2**32 - 1)
SEEDS = st.sampled_from([0, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


@PROPERTY
@given(SEEDS, st.lists(COUNTERS, min_size=1, max_size=8))
def test_tensors_give_the_words_of_the_plain_generator(seed: int, counters: list[int]) -> None:
    words = philox.philox(seed, torch.tensor(counters))
    key = (seed & 0xFFFFFFFF, seed >> 32)
    wanted = [plain_philox((counter, 0, 0, 0), key, 7) for counter in counters]
    assert [tuple(column) for column in words.t().tolist()] == wanted


# ------------------------------------------------------------------- rates


@pytest.mark.parametrize("probability", [0.01, 0.05, 0.1, 0.5, 0.9])
def test_the_rate_of_kept_elements_is_within_five_standard_deviations(probability: float) -> None:
    mask = philox.keep_mask(philox.draw_seed(0, 0, "layer"), torch.arange(1000), 256, probability)
    deviation = math.sqrt(probability * (1 - probability) / mask.numel())
    assert abs(mask.float().mean().item() - (1 - probability)) < 5 * deviation


@pytest.mark.parametrize("lag", range(1, 9))
def test_neighbouring_draws_are_uncorrelated(lag: int) -> None:
    # Eight neighbours come from one call, so these lags would show halves of a word that depend on each other.
    mask = philox.keep_mask(philox.draw_seed(9, 2, "layer"), torch.arange(500), 512, 0.5).double() - 0.5
    correlation = 4 * (mask[:, :-lag] * mask[:, lag:]).mean().item()
    assert abs(correlation) < 5 / math.sqrt(500 * (512 - lag))


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 1 / 3, 0.999])
def test_the_scale_is_one_over_the_rate_of_kept_elements(probability: float) -> None:
    kept = 65536 - philox.drop_threshold(probability)
    assert philox.keep_scale(probability) * kept / 65536 == pytest.approx(1.0, rel=1e-12)
    assert philox.drop_threshold(probability) / 65536 == pytest.approx(probability, abs=2**-17)


def test_probability_zero_is_the_identity() -> None:
    x = torch.randn(50, 30)
    assert torch.equal(philox.dropout(x, torch.arange(50), 0.0, 3), x)
    assert philox.keep_mask(3, torch.arange(50), 30, 0.0).all()


def test_a_probability_just_below_one_drops_nearly_everything() -> None:
    dropped = philox.dropout(torch.ones(4, 16), torch.arange(4), 0.999_999, 3)
    assert dropped.isfinite().all()


# ------------------------------------------------------- what a draw depends on


@PROPERTY
@given(st.lists(st.integers(0, 22)), st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_a_mask_follows_the_place_of_a_token_in_any_order_and_selection(rows: list[int], seed: int, width: int) -> None:
    places = torch.arange(1000, 1023)
    mask = philox.keep_mask(seed, places, width, 0.4)
    assert torch.equal(philox.keep_mask(seed, places[rows], width, 0.4), mask[rows])


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 65])
def test_any_width_has_a_draw_for_every_column(width: int) -> None:
    mask = philox.keep_mask(1, torch.arange(400), width, 0.5)
    assert mask.shape == (400, width)
    assert mask.dtype == torch.bool
    rates = mask.float().mean(dim=0)
    assert (rates - 0.5).abs().max() < 5 * 0.5 / math.sqrt(400)


def test_the_same_arguments_give_the_same_mask_whatever_the_global_generator_says() -> None:
    places = torch.arange(64)
    torch.manual_seed(1)
    first, state = philox.keep_mask(8, places, 64, 0.5), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(philox.keep_mask(8, places, 64, 0.5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the draws moved the global generator"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, "layer"), (1, 0, "layer")),
        ((0, 0, "layer"), (0, 1, "layer")),
        ((0, 0, "layer"), (0, 0, "layer2")),
        ((1, 11, "layer"), (11, 1, "layer")),
        ((1, 1, "1/layer"), (1, 11, "layer")),
    ],
    ids=["task seed", "step", "module", "swapped numbers", "shifted separator"],
)
def test_other_tasks_steps_and_modules_draw_other_masks(one: tuple[int, int, str], other: tuple[int, int, str]) -> None:
    seeds = philox.draw_seed(*one), philox.draw_seed(*other)
    assert seeds[0] != seeds[1]
    first, second = (philox.keep_mask(seed, torch.arange(200), 200, 0.5).double() - 0.5 for seed in seeds)
    assert abs(4 * (first * second).mean().item()) < 5 / 200, "the two masks are correlated"


def test_a_seed_has_64_bits_and_never_changes() -> None:
    # Checkpoints rely on it: a resumed run must draw what the interrupted one would have drawn.
    assert philox.draw_seed(42, 7, "model.layers.0.mlp") == 0x22D99B547172B248
    assert 0 <= min(philox.draw_seed(seed, 0, "x") for seed in range(100)) < 2**64


# ------------------------------------------------------------------ gradient


def test_the_gradient_is_the_mask_times_the_scale() -> None:
    x = torch.randn(20, 24, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(20, 24, dtype=torch.float64)
    (philox.dropout(x, torch.arange(20), 0.5, 6) * weights).sum().backward()
    mask = philox.keep_mask(6, torch.arange(20), 24, 0.5)
    assert torch.equal(x.grad, weights * mask * 2.0)


def test_a_dropped_nan_is_gone() -> None:
    mask = philox.keep_mask(6, torch.arange(20), 24, 0.5)
    x = torch.where(mask, 1.0, math.nan)
    assert torch.equal(philox.dropout(x, torch.arange(20), 0.5, 6), mask * 2.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dropout_keeps_the_type(dtype: torch.dtype) -> None:
    dropped = philox.dropout(torch.ones(9, 9, dtype=dtype), torch.arange(9), 0.5, 6)
    assert dropped.dtype == dtype
    assert set(dropped.flatten().tolist()) == {0.0, 2.0}


def test_a_mask_without_data_has_the_form_of_one_with_data() -> None:
    places = torch.arange(7)
    mask, described = philox.keep_mask(3, places, 21, 0.5), philox.keep_mask(3, places.to("meta"), 21, 0.5)
    assert described.is_meta
    assert (described.shape, described.dtype, described.stride()) == (mask.shape, mask.dtype, mask.stride())
