"""The newest client of the Tinker API against a service: its whole life cycle, and the errors that it reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
import tinker
from tinker import types

from tests.children import run_script
from tests.paths import ROOT
from tests.serve.lab import BASE, Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = Server(tmp_path_factory.mktemp("store"))
    client = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
    yield client
    client.close("success").result()
    server.close()


def datum(length: int, **inputs: Any) -> types.Datum:
    tokens = list(range(3, 4 + length))
    inputs = {"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * length})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_the_life_cycle_of_a_client(service: Any) -> None:
    client = service.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
    assert client.get_info().lora_rank == 4
    losses = []
    for _ in range(4):
        call = client.forward_backward([datum(5), datum(9)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(call.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm:mean"] > 0
    assert losses == sorted(losses, reverse=True)
    policy = datum(4, logprobs=[-1.0] * 4, advantages=[1.0, -1.0, 0.5, 0.0])
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        assert client.forward_backward([policy], loss).result().loss_fn_outputs[0]["logprobs"].shape == [4]
    custom = client.forward_backward_custom([datum(3)], lambda _, own: (-own[0].sum(), {"mine": 1.0})).result()
    assert custom.metrics["mine"] == 1.0
    with pytest.raises(tinker.RequestFailedError, match="Use importance_sampling"):
        client.forward_backward([policy], "stable_reinforce").result()
    assert client.forward([datum(4)], "cross_entropy").result().metrics["loss:sum"] > 0
    state = client.save_state("state").result().path
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, temperature=0.0)
    drawn = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params).result().sequences
    assert drawn[0].tokens == drawn[1].tokens
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()) == 3
    again = service.create_training_client_from_state_with_optimizer(state).result()
    assert (
        again.forward([datum(4)], "cross_entropy").result().metrics
        == client.forward([datum(4)], "cross_entropy").result().metrics
    )
    rest = service.create_rest_client()
    assert [own.checkpoint_id for own in rest.list_checkpoints(client.model_id).result().checkpoints] == [
        "weights/state"
    ]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_demo_kills_its_server_and_prints_that_results_are_equal(tmp_path: Any) -> None:
    printed = run_script(ROOT / "examples/serve_demo.py", "--output-dir", str(tmp_path), timeout_s=840.0)
    assert "started again" in printed
    assert printed.count("together = alone: equal to the bit") == 2
