"""Rows that join a running batch of completions, from frozen weights, while models train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from peft_mux import (
    Call,
    CallResult,
    Calls,
    Completion,
    DataError,
    Example,
    Frozen,
    GenerationRequest,
    MultiTaskPeftModel,
    Sampling,
    SamplingOptions,
    generate,
)
from tests.calls.lab import CONFIGS, SETTINGS, call, door, example
from tests.modeling.backbones import LANGUAGE_MODELS, VOCABULARY, drawn


def request(name: str, seed: int, length: int, tokens: int, **more: Any) -> GenerationRequest:
    prompt = np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist()
    options = SamplingOptions(do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=tokens, eos_token_id=0)
    return GenerationRequest(task=name, prompt=prompt, **{"seed": seed, "options": options, **more})


WAVES = [
    [("b", 1, 12, 20), ("a", 2, 5, 13)],
    [("base", 3, 20, 10)],
    [("a", 4, 3, 15), ("c", 5, 8, 5), ("b", 6, 30, 16)],
    [("a", 7, 7, 1), ("b", 8, 14, 6), ("base", 9, 4, 18)],
]


def alone(weights: dict[str, Frozen], one: GenerationRequest) -> Completion:
    """Return a completion by `generate`, from a model of these weights alone."""
    name = one.task if one.task in weights else "a"
    model = MultiTaskPeftModel(drawn(LANGUAGE_MODELS["Llama"][0]), {name: CONFIGS[name]})
    with torch.no_grad():
        for key, weight in model.task_parameters(name).items():
            weight.copy_(weights[name].weights[key]) if one.task in weights else weight.zero_()
    return generate(model, [GenerationRequest(task=name, prompt=one.prompt, options=one.options, seed=one.seed)])[0]


def train(calls: Calls) -> None:
    rng = np.random.default_rng(0)
    calls.run([call(name, example(rng, 9)) for name in "abc"])
    calls.step(SETTINGS)


def test_rows_that_join_and_leave_draw_what_they_draw_alone_while_models_train() -> None:
    calls = door()
    weights = {name: calls.freeze(name) for name in "abc"}
    sampling = calls.sampling()
    requests: dict[int, GenerationRequest] = {}
    found: dict[int, Completion] = {}
    for wave in WAVES:
        own = [request(*one) for one in wave]
        requests |= zip(sampling.add([(weights.get(one.task), one) for one in own]), own, strict=True)
        for _ in range(4):
            found |= sampling.advance()
        train(calls)
    while sampling.numbers:
        found |= sampling.advance()
    assert found.keys() == requests.keys()
    for number, one in requests.items():
        expected = alone(weights, one)
        assert (found[number].task, found[number].token_ids) == (one.task, expected.token_ids)
        assert np.abs(np.subtract(found[number].logprobs, expected.logprobs)).max() < 1e-4
        assert found[number].finish_reason == expected.finish_reason
    # Weights that have moved, of the same configuration, and a task that came meanwhile.
    moved = calls.freeze("a")
    calls.drop("c")
    sampling.add([(moved, request("a", 2, 5, 13))])
    calls.open("c", CONFIGS["c"], seed=0)
    (completion,) = finished(sampling).values()
    assert completion.token_ids == alone({"a": moved}, request("a", 2, 5, 13)).token_ids
    assert sum(name.startswith("frozen-") for name in calls.model.tasks) == 3
    lone = calls.sampling()
    for number, one in requests.items():
        lone.add([(weights.get(one.task), one)])
        (alone_here,) = finished(lone).values()
        assert found[number].logprobs == alone_here.logprobs  # on a CPU to the bit


def finished(sampling: Sampling) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while sampling.numbers:
        found |= sampling.advance()
    return found


@pytest.mark.parametrize("name", ["a", "b"])
def test_log_probabilities_of_samples_prompts_and_likeliest_tokens_are_those_of_calls(name: str) -> None:
    calls = door()
    sampling, weights = calls.sampling(), calls.freeze(name)
    asked = request(name, 3, 11, 9, top_logprobs=2, prompt_logprobs=3)
    sampling.add([(weights, asked), (weights, request(name, 4, 20, 9)), (None, request("base", 5, 2, 9))])
    one = finished(sampling)[1]
    tokens = np.asarray([*one.prompt_token_ids, *one.token_ids])
    every = np.tile(np.arange(VOCABULARY), (len(tokens) - 1, 1))
    result = calls.run([Call(name, [Example(tokens[:-1], every)], lambda own: own.nll_M.sum(), backward=False)])[name]
    assert isinstance(result, CallResult)
    logprobs = result.logprobs[0]
    own = logprobs[np.arange(len(logprobs)), tokens[1:]]
    assert one.prompt_logprobs[0] is None
    assert np.abs(own - [*one.prompt_logprobs[1:], *one.logprobs]).max() < 1e-4
    assert one.prompt_top_logprobs[0] == ()
    for place, (top, count) in enumerate(
        [*((top, 3) for top in one.prompt_top_logprobs[1:]), *((top, 2) for top in one.top_logprobs)]
    ):
        likeliest = np.argsort(-logprobs[place])[:count]
        assert [token for token, _ in top] == likeliest.tolist()
        assert np.abs(logprobs[place][likeliest] - [value for _, value in top]).max() < 1e-4
    assert len(one.top_logprobs) == len(one.token_ids)


def test_rows_end_at_stop_tokens_leave_when_cancelled_and_are_refused_by_name() -> None:
    calls = door(names="a")
    sampling, weights = calls.sampling(), calls.freeze("a")
    sampling.add([(weights, request("a", 1, 5, 20))])
    (whole,) = finished(sampling).values()
    stop = whole.token_ids[6:9]
    ends = next(end for end in range(3, 21) if whole.token_ids[end - 3 : end] == stop)
    options = SamplingOptions(
        do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=20, eos_token_id=0, stop_token_ids=[[96, 96], stop]
    )
    numbers = sampling.add(
        [(weights, request("a", 1, 5, 20, options=options)), *((weights, request("a", n, 5, 20)) for n in (2, 3))]
    )
    sampling.cancel(numbers[1:2])
    found = finished(sampling)
    assert list(found) == [numbers[0], numbers[2]]
    assert found[numbers[0]].token_ids == whole.token_ids[:ends]
    assert found[numbers[0]].finish_reason == "stop"
    sampling.cancel([sampling.add([(None, request("a", 1, 5, 20))])[0], 99])
    assert (sampling.numbers, sampling.advance()) == ([], {})
    with pytest.raises(DataError, match=r"prompts\.a row 0 must have at most 64 tokens"):
        sampling.add([(None, request("a", 1, 5, 20)), (weights, request("a", 1, 50, 20))])
    assert sampling.numbers == []
