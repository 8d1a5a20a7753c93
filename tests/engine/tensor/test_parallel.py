"""Tensor parallelism: shards in real processes give what one process gives, and send no more than necessary."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import OlmoeConfig, OlmoeForCausalLM

from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.cut import held_ranges
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.errors import CheckpointError, UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding import Piece
from tests.engine.processes import cases as parallel_cases
from tests.engine.tensor import parallel_cases as cases

pytestmark = pytest.mark.distributed

OF_TWO = ("llama-recomputed", "llama-poisoned", "qwen-head", "gpt2-dropped")
OF_FOUR = ("llama", "gpt2")
STAGED = ("llama-recomputed", "qwen")


def bytes_per_pass(
    num_tokens: int,
    num_targets: int,
    *,
    num_layers: int,
    hidden_size: int,
    tp_size: int,
    has_head: bool = True,
    recomputes: bool = False,
    element_bytes: int = 4,
) -> int:
    """Return `TensorLinks.num_bytes` of one forward and backward pass: no weight is among it.

    Each layer sums `[T, D]` twice in the forward pass and twice in the backward pass, except the gradient of the first
    layer's input, which is not needed. Where activations are recomputed, the sum of attention's output is made again;
    that of the MLP is not, as nothing needs it there. The head sums three numbers a rank for each target, in fp32,
    and the gradient of the `[M, D]` hidden states of the targets.

    Args:
        num_tokens: T, tokens of the micro-batch.
        num_targets: M, tokens of the micro-batch that have a target.
        num_layers: decoder layers of the stage.
        hidden_size: D, width of the hidden states.
        tp_size: number of tensor parallel ranks of the stage.
        has_head: whether the stage computes the losses, with a head that no task adapts.
        recomputes: whether activations are checkpointed.
        element_bytes: bytes of one element of the activations.
    """
    num_sums = num_layers * (5 if recomputes else 4) - 1
    head_bytes = num_targets * (3 * tp_size * 4 + hidden_size * element_bytes) if has_head else 0
    return num_sums * num_tokens * hidden_size * element_bytes + head_bytes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def of_two(home: Path) -> list[dict[str, Any]]:
    return parallel_cases.values(parallel_cases.launch(2, cases.train_shards, OF_TWO, home, limit_s=150))


@pytest.fixture(scope="module")
def of_four(home: Path) -> list[dict[str, Any]]:
    return parallel_cases.values(parallel_cases.launch(4, cases.train_four, OF_FOUR, STAGED, home, limit_s=150))


@functools.cache
def alone(name: str, folder: Path) -> cases.Shown:
    return cases.train_alone(cases.CASES[name], folder)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    alone.cache_clear()


def check_as_alone(shown: list[cases.Shown], weights: dict[str, dict[str, np.ndarray]], expected: cases.Shown) -> None:
    """Compare the results of processes with one process."""
    assert len({str(one.seen) for one in shown}) == 1, "losses, norms and verdicts are the same bits on all"
    seen = shown[0].seen
    assert seen.failures == expected.seen.failures
    for task, losses in expected.seen.losses.items():
        assert seen.losses[task] == pytest.approx(losses, rel=1e-5, nan_ok=True), task
        assert seen.norms[task] == pytest.approx(expected.seen.norms[task], rel=1e-4, nan_ok=True), task
    for task, own in expected.weights.items():
        assert weights[task].keys() == own.keys()
        for key, weight in own.items():
            found = weights[task][key]
            assert np.array_equal(np.isnan(found), np.isnan(weight)), (task, key)
            gap = np.linalg.norm(np.nan_to_num(found - weight))
            assert gap <= 1e-4 * np.linalg.norm(np.nan_to_num(weight)), (task, key)


@pytest.mark.parametrize("name", OF_TWO)
def test_two_shards_train_every_task_as_one_process_does(name: str, of_two: list[dict[str, Any]], home: Path) -> None:
    shown = [one[name] for one in of_two]
    check_as_alone(shown, shown[0].weights, alone(name, home))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_shards_train_every_task_as_one_process_does(name: str, of_four: list[dict[str, Any]], home: Path) -> None:
    shown = [one["tp4"][name] for one in of_four]
    check_as_alone(shown, shown[3].weights, alone(name, home))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_two_stages_of_two_shards_train_every_task_as_one_process_does(
    name: str, of_four: list[dict[str, Any]], home: Path
) -> None:
    shown = [one["tp2xpp2"][name] for one in of_four]
    first, last = shown[0].weights, shown[2].weights
    assert not any(first[task].keys() & last[task].keys() for task in first), "no weight lies in both stages"
    whole = {task: {**first[task], **last[task]} for task in first}
    check_as_alone(shown, whole, alone(name, home))


def test_a_poisoned_task_ends_alone(of_two: list[dict[str, Any]], home: Path) -> None:
    for one in of_two:
        seen = one["llama-poisoned"].seen
        assert list(seen.failures) == ["d"]
        assert all(np.isfinite(losses).all() for task, losses in seen.losses.items() if task != "d")


def test_shards_hold_their_part_of_the_frozen_weights_and_no_more(of_two: list[dict[str, Any]], home: Path) -> None:
    model = cases.backbone("llama")
    layers = sum(item.nbytes for name, item in model.named_parameters() if "proj.weight" in name)
    head, expected = model.lm_head.weight.nbytes, alone("llama-recomputed", home).frozen_bytes
    biases = sum(item.nbytes for name, item in model.named_parameters() if name.endswith("bias"))
    for one in of_two:
        saved = expected - one["llama-recomputed"].frozen_bytes
        words = 4 * cases.HIDDEN
        assert 0 <= saved - (layers + head) / 2 <= biases + words


def test_a_pass_sends_what_the_closed_form_says_and_cutting_sends_nothing(of_two: list[dict[str, Any]]) -> None:
    batch = cases.one_batch(("a", "b"))
    for one in of_two:
        for name, sent in one["facts"]["bytes"].items():
            expected = bytes_per_pass(
                batch.num_tokens,
                len(batch.target_rows),
                num_layers=cases.NUM_LAYERS,
                hidden_size=cases.HIDDEN,
                tp_size=2,
                recomputes=cases.CASES[name].recomputes,
            )
            assert sent["pass"] == expected, name
            assert sent["cutting"] == 0


def test_logits_of_evaluation_are_whole_and_those_of_one_process(of_two: list[dict[str, Any]]) -> None:
    for one in of_two:
        assert all(gap < 1e-5 for gap in one["facts"]["logits"].values()), one["facts"]["logits"]


@pytest.mark.parametrize("what", ["late", "classifiers"])
def test_late_tasks_with_whole_weights_and_classifiers_compute_what_one_process_does(
    what: str, of_two: list[dict[str, Any]]
) -> None:
    for one in of_two:
        assert one["facts"][what]["loss"] < 1e-5
        assert one["facts"][what]["gradient"] < 1e-5


@pytest.mark.parametrize("shape", ["gpt2", "qwen"])
def test_attention_dropout_of_parts_of_long_sequences_is_that_of_one_process(
    shape: str, of_two: list[dict[str, Any]]
) -> None:
    for one in of_two:
        assert one["facts"]["chains"][shape]["loss"] < 1e-5
        assert one["facts"]["chains"][shape]["gradient"] < 1e-5


@pytest.mark.parametrize("shape", ["qwen", "gpt2"])
def test_shards_that_all_generate_give_the_tokens_and_logits_of_one_process(
    shape: str, of_two: list[dict[str, Any]]
) -> None:
    for one in of_two:
        generated = one["facts"]["generated"][shape]
        assert generated["found"] == generated["expected"]
        assert generated["gap"] < 1e-5


def test_a_tied_head_is_a_view_of_the_embedding_and_an_untied_one_is_not(of_two: list[dict[str, Any]]) -> None:
    assert all(one["facts"]["views"] == {"llama": False, "qwen": True} for one in of_two)


def test_a_shard_that_fails_in_a_pass_ends_the_waiting_of_the_others() -> None:
    outcomes = parallel_cases.launch(2, cases.fail_in_a_pass, limit_s=90)
    assert outcomes[1].error == "RuntimeError: a kernel has failed"
    assert outcomes[0].error.startswith("ProcessError: rank 0 of 2 got no answer at a sum over the shards of a stage")
    assert "a kernel has failed" in outcomes[0].error


# ---------------------------------------------------------------- in one process


class Mute:
    """Links of a shard that sends nothing."""

    def __init__(self, index: int = 0, size: int = 2) -> None:
        self.index, self.size = index, size

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("nothing is to be sent")


def small(backbone: Any, targets: Any = ("q_proj",)) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(backbone, {"one": LoraConfig(r=2, target_modules=list(targets))}, verify=False)


def digest(model: MultiTaskPeftModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(item.shape) for name, item in model.named_parameters()}


def test_an_architecture_that_is_not_tested_is_refused_by_name() -> None:
    config = OlmoeConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None)
    with pytest.raises(UnsupportedModelError, match=r"'olmoe'.*gpt2, .*llama, .*shard_backbone=True"):
        TensorParallelModel(small(OlmoeForCausalLM(config)), Mute())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 1}, r"tensor_parallel_size must divide .*one of 1, got .*num_key_value_heads=1"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}, r"num_attention_heads=2"),
        ({"intermediate_size": 50}, r"tensor_parallel_size must divide .*one of 1, 2, got .*intermediate_size=50"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused_with_those_that_can(changed: dict[str, int], message: str) -> None:
    tp_size = 2 if "num_key_value_heads" in changed and len(changed) == 1 else 4
    model = small(cases.backbone("llama", **changed))
    before = digest(model)
    with pytest.raises(UnsupportedModelError, match=message):
        TensorParallelModel(model, Mute(size=tp_size))
    assert digest(model) == before


def test_a_plan_of_transformers_that_says_something_else_is_refused() -> None:
    model = small(cases.backbone("llama"))
    plan = {**model.backbone.config.base_model_tp_plan, "layers.*.mlp.up_proj": "rowwise"}
    model.backbone.config.base_model_tp_plan = plan
    with pytest.raises(UnsupportedModelError, match=r"\['gate_proj'\] and \['up_proj', 'down_proj'\] at 'mlp'"):
        TensorParallelModel(model, Mute())


def test_a_model_is_cut_once() -> None:
    model = small(cases.backbone("llama"))
    TensorParallelModel(model, Mute())
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.layers\.0\.self_attn\.o_proj is already cut\. Load the model again",
    ):
        TensorParallelModel(model, Mute())


def test_a_single_shard_is_the_model_as_it_was() -> None:
    model = small(cases.backbone("llama"))
    before = digest(model)
    TensorParallelModel(model, Mute(size=1)).register_pieces(["one"])
    assert digest(model) == before
    assert model.registry.pieces == {}


def test_pieces_of_all_shards_make_up_every_parameter_once() -> None:
    case = cases.ShardCase("gpt2", with_head=True)
    whole = cases.mux_model(case)
    shards = [cases.mux_model(case) for _ in range(2)]
    for index, model in enumerate(shards):
        TensorParallelModel(model, Mute(index))
    for name in whole.tasks:
        for key, parameter in whole.task_parameters(name).items():
            covered = torch.zeros(parameter.shape)
            for model in shards:
                piece, part = model.registry.pieces_of(name)[key], model.task_parameters(name)[key]
                assert torch.equal(piece.take(parameter), part), (name, key)
                if not piece.is_whole:
                    mine = torch.zeros(parameter.shape)
                    piece.put(mine, torch.ones(part.shape))
                    covered += mine
            is_cut = not shards[0].registry.pieces_of(name)[key].is_whole
            assert (covered == is_cut).all(), (name, key)


def test_gradients_that_all_shards_hold_equally_count_once_and_partial_ones_everywhere() -> None:
    model = cases.mux_model(cases.ShardCase("llama"))
    TensorParallelModel(model, Mute(1))
    pieces = model.registry.pieces_of("e")
    prefix = "base_model.model.model"
    embedding = pieces[f"{prefix}.embed_tokens.lora_embedding_A"]
    assert embedding == Piece.whole(embedding.shape, adds=False)
    assert pieces[f"{prefix}.layers.0.self_attn.o_proj.lora_B.weight"] == Piece.whole((cases.HIDDEN, 6))
    row = pieces[f"{prefix}.layers.0.self_attn.o_proj.lora_A.weight"]
    assert (row.dim, row.ranges, row.adds) == (1, ((16, 32),), True)


def test_whole_weights_of_another_shape_are_refused_and_change_nothing() -> None:
    model = cases.mux_model(cases.ShardCase("llama"))
    shards = TensorParallelModel(model, Mute())
    before = {key: parameter.detach().clone() for key, parameter in model.task_parameters("b").items()}
    with pytest.raises(
        CheckpointError,
        match=r'task "b": .*q_proj\.lora_B\.weight must .*\[32.*, got shape \[16, 4\]',
    ):
        shards.model.registry.place_whole("b", model.task_parameters("b"))
    with pytest.raises(
        CheckpointError,
        match=(
            r'task "b": base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight must be.*, '
            r"got nothing"
        ),
    ):
        shards.model.registry.place_whole("b", {})
    assert all(torch.equal(before[key], parameter) for key, parameter in model.task_parameters("b").items())


def test_a_dimension_of_several_parts_is_cut_part_by_part() -> None:
    assert held_ranges([4, 4, 4], 1, 2) == ((2, 4), (6, 8), (10, 12))
    words = [held_ranges([97], shard, 4)[0] for shard in range(4)]
    assert (words[0][0], words[-1][1]) == (0, 97)
    assert all(one[1] == other[0] for one, other in zip(words[:-1], words[1:], strict=True))


def test_links_of_a_rank_that_is_in_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 must be in exactly one of the groups \[\[0, 1\]\], got 0"):
        TensorLinks([(0, 1)], Processes(2, 3))


def test_links_of_a_single_shard_send_nothing() -> None:
    links = TensorLinks([(0,)], Processes())
    tensor = torch.ones(3)
    links.all_reduce(tensor).wait()
    assert (tensor.tolist(), links.num_bytes, links.size) == ([1.0, 1.0, 1.0], 0, 1)
