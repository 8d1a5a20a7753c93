"""Calls of many models in shared passes, against each model alone in a door of its own and against plain PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model

from peft_mux import (
    AdamSettings,
    Call,
    CallFailure,
    CallResult,
    Calls,
    CheckpointError,
    ConfigError,
    DataError,
    Example,
    UnsupportedModelError,
)
from peft_mux.checkpoint.task_state import TaskState
from peft_mux.kernels import adamw
from tests.calls.lab import CONFIGS, SETTINGS, bits, call, cross_entropy, door, example, plain
from tests.modeling.adapters.passes import perturbed
from tests.modeling.backbones import CLASSIFIERS, LANGUAGE_MODELS, VOCABULARY, backbone_of, drawn

Rows = dict[str, list[dict[str, Any]]]


def lengths(*numbers: int) -> list[dict[str, Any]]:
    return [{"length": number} for number in numbers]


PREFIX = list(range(1, 40))
CASES: dict[str, Rows] = {
    "rows of many lengths": {"a": lengths(20, 7, 33), "b": lengths(50), "c": lengths(9, 60, 12)},
    "single tokens": {"a": lengths(1), "b": lengths(1), "c": lengths(1, 2)},
    "several targets": {"a": [{"length": 5, "several": 3}] * 3, "b": [{"length": 9, "several": 2}], "c": lengths(13)},
    "shared prefixes and next tokens": {
        "a": lengths(40),
        "b": [{"length": 6, "prefix": PREFIX}] * 6,
        "c": lengths(50, 3),
    },
}


def waves(rows: Rows, num_waves: int = 4) -> list[list[Call]]:
    rng = np.random.default_rng(0)
    return [[call(name, *(example(rng, **one) for one in own)) for name, own in rows.items()] for _ in range(num_waves)]


def results_of(calls: Calls, wave: list[Call]) -> dict[str, Any]:
    return {name: plain(result) for name, result in calls.run(wave).items()}


@pytest.mark.parametrize("piece_tokens", [4096, 24])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_calls_and_steps_that_share_passes_give_the_bits_that_each_model_gives_alone(
    rows: Rows, piece_tokens: int
) -> None:
    together = door(piece_tokens=piece_tokens, pass_tokens=100)
    alone = {name: door(names=[name], piece_tokens=piece_tokens) for name in rows}
    for number, wave in enumerate(waves(rows)):
        found = results_of(together, wave)
        assert found == {own.model: results_of(alone[own.model], [own])[own.model] for own in wave}
        if number % 2:  # gradients of two calls add up
            norms = together.step({name: SETTINGS[name] for name in rows})
            assert norms == {name: alone[name].step({name: SETTINGS[name]})[name] for name in rows}
            assert 0 < norms["a"] < float("inf")
    assert {name: bits(together, name) for name in rows} == {name: bits(alone[name], name) for name in rows}


def test_a_joint_step_as_on_a_gpu_has_the_bits_of_single_steps_and_leaves_out_a_model_whose_norm_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = CASES["rows of many lengths"]
    joint, single = door(), door()
    for number, wave in enumerate(waves(rows)[:2]):
        norms = []
        for calls, update in ((single, None), (joint, adamw.foreach_update)):
            monkeypatch.setattr(adamw, "joint_update", lambda device, update=update: update)
            calls.run(wave)
            if number:
                next(iter(calls.model.task_parameters("c").values())).grad.fill_(float("nan"))
            norms.append(calls.step(SETTINGS))
            assert not any(page.values.grad.any() for page in calls.model.registry.slab_of("c").pages)
        assert norms[0] == norms[1]
        assert isinstance(norms[1]["c"], CallFailure) == bool(number)
    assert {name: bits(joint, name) for name in rows} == {name: bits(single, name) for name in rows}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_losses_gradients_and_steps_are_those_of_plain_peft(kind: str) -> None:
    rng = np.random.default_rng(1)
    examples = [example(rng, 9), example(rng, 17), example(rng, 5)]
    calls = door(kind, "a")
    backbone = drawn(LANGUAGE_MODELS[kind][0])
    torch.manual_seed(1)
    model = get_peft_model(backbone, copy.deepcopy(CONFIGS["a"])).eval()
    own = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if weight.requires_grad}
    perturbed(own, ord("a"))
    # With a small epsilon, AdamW turns gradients that are mostly rounding into steps of full size.
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for _ in range(2):
        result = calls.run([call("a", *examples)])["a"]
        assert isinstance(result, CallResult)
        total = torch.zeros(())
        for one, logprobs in zip(examples, result.logprobs, strict=True):
            logits = model(input_ids=torch.from_numpy(one.tokens)[None]).logits[0]
            expected = logits.float().log_softmax(-1).gather(1, torch.from_numpy(one.targets)[:, None])[:, 0]
            assert np.abs(logprobs - expected.detach().numpy()).max() < 1e-4
            total = total - (expected * torch.from_numpy(one.columns["weights"]).float()).sum()
        assert abs(result.loss - total.item()) < 1e-3
        total.backward()
        calls.step({"a": AdamSettings(1e-3, eps=1e-3, weight_decay=0.1)})
        optimizer.step()
        optimizer.zero_grad()
    trained = calls.model.task_parameters("a")
    assert max(float((trained[name] - weight).detach().abs().max()) for name, weight in own.items()) < 1e-4


def test_a_pass_takes_one_piece_of_each_call_in_the_given_order_and_a_call_without_backward_leaves_no_gradient() -> (
    None
):
    calls = door(piece_tokens=10, pass_tokens=20)
    rng = np.random.default_rng(2)
    before = bits(calls, "b")
    calls.submit(call("a", *(example(rng, 10) for _ in range(3))))
    calls.submit(call("b", example(rng, 10), backward=False))
    calls.submit(call("c", example(rng, 10)))
    assert list(calls.advance(["c", "unknown", "a"])) == ["c"]
    assert list(calls.advance()) == ["b"]
    with pytest.raises(ConfigError, match=r"models\.a must have no unfinished call for a step"):
        calls.step({"a": SETTINGS["a"]})
    assert isinstance(calls.run([call("c", example(rng, 10))])["c"], CallResult)
    assert list(calls.advance()) == ["a"]
    assert calls.advance() == {}
    assert bits(calls, "b") == before


def test_a_state_in_mid_accumulation_continues_in_another_door_with_the_same_bits() -> None:
    (first, second, third, fourth), rows = waves(CASES["rows of many lengths"]), "abc"
    calls = door(piece_tokens=24)
    calls.run(first)
    calls.step(SETTINGS)
    calls.run(second)
    states = {name: calls.state(name) for name in rows}
    weights = {name: calls.freeze(name).weights for name in rows}
    calls.submit(third[0])
    for refused in (lambda: calls.state("a"), lambda: calls.restore("a", states["a"])):
        with pytest.raises(ConfigError, match=r"models\.a must have no unfinished call"):
            refused()
    calls.run(third[1:])
    while not calls.advance():
        pass
    calls.step(SETTINGS)
    calls.run(fourth)
    other = door(piece_tokens=24)
    for name in rows:
        other.drop(name)
        other.open(name, CONFIGS[name], seed=5)
        other.restore(name, states[name])
    other.run(third)
    other.step(SETTINGS)
    other.run(fourth)
    assert {name: bits(other, name) for name in rows} == {name: bits(calls, name) for name in rows}
    # Into a model that has other moments, and weights alone: the first step then has no moments.
    calls.restore("a", states["a"], only_weights=True)
    new = door(names="a", piece_tokens=24)
    new.restore("a", TaskState(dict(weights["a"]), {}, {}, {}), only_weights=True)
    for one in (calls, new):
        one.run(fourth[:1])
        one.step({"a": SETTINGS["a"]})
    assert bits(calls, "a") == bits(new, "a")
    before = bits(calls, "a")
    with pytest.raises(CheckpointError, match="must be a tensor of shape"):
        calls.restore("a", states["b"])
    assert bits(calls, "a") == before


def no_gradient_where_finite(outputs: Any) -> torch.Tensor:
    return torch.sqrt(outputs.nll_M * 0).sum()


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in the backward pass")


FAILURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (lambda own: own.columns["none"], "the loss raises KeyError: 'none'"),
    "raises backwards": (lambda own: Boom.apply(own.nll_M), "the loss raises RuntimeError: in the backward pass"),
    "not a number": (lambda own: own.nll_M.sum() * float("nan"), "the loss is nan"),
    "gradient": (no_gradient_where_finite, "the gradient of the loss is not finite"),
    "too large": (
        lambda own: (own.nll_M - own.nll_M.detach()).sum() * 1e38,
        "the gradient of the weights is not finite",
    ),
    "shape": (lambda own: own.nll_M, "the loss raises TypeError: it must return a tensor with one number"),
}


@pytest.mark.parametrize(("loss", "reason"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_call_that_fails_fails_alone_and_leaves_accumulated_gradients(
    loss: Callable[[Any], Any], reason: str, has_gradients: bool
) -> None:
    calls, alone = door(piece_tokens=20), door(names=["c"], piece_tokens=20)
    rng = np.random.default_rng(3)
    rows = {name: [example(rng, 12) for _ in range(3)] for name in "abc"}
    if has_gradients:
        calls.run([call(name, *own) for name, own in rows.items()])
        alone.run([call("c", *rows["c"])])
    before = bits(calls, "a")
    turns = iter([cross_entropy, loss, loss])  # fails in the second piece
    bad = call("a", *rows["a"], loss=lambda own: next(turns)(own))
    found = calls.run([bad, call("b", *rows["b"]), call("c", *rows["c"])])
    assert isinstance(found["a"], CallFailure)
    assert found["a"].is_callers
    assert found["a"].reason.startswith(reason)
    assert bits(calls, "a") == before
    assert plain(found["c"]) == results_of(alone, [call("c", *rows["c"])])["c"]
    assert bits(calls, "c") == bits(alone, "c")
    # A call of a constant has a gradient of zero.
    assert isinstance(calls.run([call("a", *rows["a"], loss=lambda own: torch.ones(()))])["a"], CallResult)
    assert bits(calls, "a") == before


def test_a_call_whose_pass_raises_fails_alone_and_its_neighbours_are_repeated_apart() -> None:
    calls, alone = door(), door()
    rng = np.random.default_rng(5)
    wave = [call("a", example(rng, 12)), call("b", example(rng, 9))]
    for one in (calls, alone):
        one.run(wave)
    compute, before = calls._outputs, bits(calls, "b")

    def broken(batch: Any, num_models: int) -> Any:
        found = compute(batch, num_models)
        if "b" in batch.task_names:
            sum(own.nll_M.sum() for own in found).backward()  # leaves gradients that must not stay
            raise ValueError("an odd row")
        return found

    calls._outputs = broken  # type: ignore[method-assign]
    found = calls.run(wave)
    assert isinstance(found["b"], CallFailure)
    assert (found["b"].reason, found["b"].is_callers) == ("the pass raises ValueError: an odd row", False)
    assert bits(calls, "b") == before
    calls._outputs = compute  # type: ignore[method-assign]
    alone.run(wave[:1])
    assert bits(calls, "a") == bits(alone, "a")


def test_a_pass_without_memory_is_computed_in_smaller_ones_and_a_row_that_does_not_fit_fails_alone() -> None:
    calls, alone = door(piece_tokens=64, pass_tokens=100), door(piece_tokens=64, pass_tokens=100)
    rng = np.random.default_rng(4)
    wave = [call("a", example(rng, 30), example(rng, 30)), call("b", example(rng, 20))]
    for one in (calls, alone):
        one.run(wave)
    compute = calls._outputs
    tokens: list[int] = []

    def compute_at_most(most: int) -> None:
        def limited(batch: Any, num_models: int) -> Any:
            tokens.append(batch.task_offsets[num_models])
            found = compute(batch, num_models)
            if tokens[-1] > most:
                sum(own.nll_M.sum() for own in found).backward()  # leaves gradients that must not stay
                raise torch.OutOfMemoryError("no memory for this")
            return found

        calls._outputs = limited  # type: ignore[method-assign]

    compute_at_most(60)
    assert results_of(calls, wave) == results_of(alone, wave)
    assert tokens == [80, 60, 20]
    assert (calls.pass_tokens, calls.piece_tokens) == (40, 64)
    assert [bits(calls, name) for name in "ab"] == [bits(alone, name) for name in "ab"]
    compute_at_most(30)
    before = bits(calls, "b")
    found = calls.run([wave[0], call("b", example(rng, 40))])
    assert isinstance(found["a"], CallResult)
    assert (calls.pass_tokens, calls.piece_tokens) == (30, 30)
    assert isinstance(found["b"], CallFailure)
    assert "calls.b.examples[0]: a row of 40 tokens does not fit into memory (no memory for this)" in found["b"].reason
    assert bits(calls, "b") == before
    compute_at_most(10_000)
    sizes = []
    for _ in range(2 * 64):
        calls.run([call("a", example(rng, 2))])
        sizes.append((calls.pass_tokens, calls.piece_tokens))
    assert (sizes[0], sizes.count((60, 60)), sizes[-1]) == ((30, 30), 64, (100, 64))


GOOD = np.arange(5)
REFUSED: dict[str, tuple[Example, str]] = {
    "beyond the vocabulary": (
        Example(GOOD, GOOD + VOCABULARY),
        rf"\.targets must be token ids from 0 to {VOCABULARY - 1}",
    ),
    "negative": (Example(GOOD - 1, GOOD), r"\.tokens must be token ids"),
    "fractions": (Example(GOOD / 2, GOOD), r"\.tokens must be token ids"),
    "empty": (Example(GOOD[:0], GOOD[:0]), r"\.tokens must be a list of at least one token id, got the shape \[0\]"),
    "too long": (
        Example(np.ones(65, int), np.ones(65, int)),
        "must be at most the backbone's 64 positions, got 65 tokens",
    ),
    "unequal": (
        Example(GOOD, GOOD[1:]),
        r"\.targets must be of the shape \[T\] or \[T, K\] for T tokens, got the shape \[4\] for 5",
    ),
    "column": (
        Example(GOOD, GOOD, {"weights": GOOD[1:]}),
        r"\.columns\.weights must be one entry for each of 5 tokens",
    ),
    "NaN": (Example(GOOD, GOOD, {"weights": GOOD * np.nan}), r"\.columns\.weights must be finite numbers, got \[nan"),
    "infinite in fp32": (Example(GOOD, GOOD, {"weights": GOOD * 1e300}), r"\.columns\.weights must be finite numbers"),
    "text": (Example(GOOD, GOOD, {"weights": np.asarray(["x"] * 5)}), r"\.columns\.weights must be finite numbers"),
    "reserved": (Example(GOOD, GOOD, {"target_ids": GOOD}), r"\.columns\.target_ids must be named otherwise"),
    "other columns": (Example(GOOD, GOOD), "must be of the same shapes and columns as the first example"),
}


@pytest.mark.parametrize(("bad", "message"), REFUSED.values(), ids=REFUSED)
def test_rows_that_cannot_be_computed_are_refused_by_name_and_nothing_changes(bad: Example, message: str) -> None:
    calls = door(names="ab")
    good = Example(GOOD, GOOD, {"weights": GOOD})
    with pytest.raises(DataError, match=rf"calls\.b\.examples\[1\].*{message}"):
        calls.run([call("a", good, loss=cross_entropy), call("b", good, bad)])
    assert calls.advance() == {}
    assert isinstance(calls.run([call("a", good, loss=cross_entropy)])["a"], CallResult)


def test_models_calls_and_settings_that_cannot_be_used_are_refused_by_name() -> None:
    calls = door(names="a")
    rows = [Example(GOOD, GOOD, {"weights": GOOD})]
    with pytest.raises(DataError, match=r"calls\.a\.examples must be at least one example, got none"):
        calls.submit(Call("a", [], cross_entropy))
    with pytest.raises(ConfigError, match=r"the model must be one of a, got 'A'"):
        calls.submit(Call("A", rows, cross_entropy))
    with pytest.raises(ConfigError, match="calls must be of different models, got a, a"):
        calls.run([Call("a", rows, cross_entropy)] * 2)
    calls.submit(Call("a", rows, cross_entropy))
    with pytest.raises(ConfigError, match=r"models\.a must have no unfinished call for another one"):
        calls.submit(Call("a", rows, cross_entropy))
    q = {"target_modules": ["q_proj"]}
    for config, message in (
        (LoraConfig(r=257, **q), r"models\.b\.config\.r must be an integer from 1 to 256, got 257"),
        (LoraConfig(r=4, rank_pattern={"q_proj": 300}, **q), "got 4, 300"),
        (LoraConfig(lora_dropout=0.1, **q), "must be a LoraConfig without dropout, got one in which its lora_dropout"),
        (LoraConfig(task_type="SEQ_CLS", **q), "config.task_type must be CAUSAL_LM or None, got "),
        (AdaLoraConfig(total_step=9, **q), r"models\.b\.config must be a LoraConfig, got AdaLoraConfig"),
        (LoraConfig(target_modules=["nothing"]), "nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            calls.open("b", config, seed=0)
    with pytest.raises(ConfigError, match=r"models\.a must be a new name, got a name that is taken"):
        calls.open("a", CONFIGS["a"], seed=0)
    with pytest.raises(
        ConfigError, match=r"(?s)learning_rate must be a finite .* got nan.*beta2 must be .* below 1, got 1"
    ):
        AdamSettings(float("nan"), beta2=1)
    calls.drop("a")
    assert calls.advance() == {}
    assert calls.model.tasks == ("base-model",)
    with pytest.raises(ConfigError, match="the model must be opened first, got 'a'"):
        calls.drop("a")


def test_a_backbone_that_cannot_serve_calls_is_refused_and_one_with_tasks_is_taken() -> None:
    with pytest.raises(UnsupportedModelError, match="Calls needs a decoder-only language model"):
        Calls(drawn(CLASSIFIERS["Llama"][0]))
    with pytest.raises(UnsupportedModelError, match=r"without dropout, but the backbone's own dropout .*0\.1"):
        Calls(backbone_of("llama", attention_dropout=0.1)())
    with pytest.raises(ConfigError, match="piece_tokens must be an integer of at least 1, got 0"):
        Calls(drawn(LANGUAGE_MODELS["Llama"][0]), piece_tokens=0)
    first = door(names="a")
    calls = Calls(first.model)
    with pytest.raises(ConfigError, match="a name that is taken"):
        calls.open("a", CONFIGS["a"], seed=0)
