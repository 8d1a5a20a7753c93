"""A task's rows of embeddings and tied heads, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, TrainableTokensConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import tied_llama, tiny_gpt2, together
from tests.modeling.adapters.passes import assert_nan_stays, assert_refused, assert_same_tensors

QUERIES: dict[str, Any] = {"r": 3, "target_modules": ["q_proj"]}
TOKENS = sorted(set(lab.rows(21, 10, 8, 8)[0]["input_ids"]))[:3]
TIED_CONFIGS = {
    "listed": LoraConfig(**QUERIES, trainable_token_indices=[*TOKENS, 90]),
    "plain": LoraConfig(r=2, target_modules="all-linear"),
    "named": LoraConfig(**QUERIES, trainable_token_indices={"embed_tokens": [4, 17, 60]}),
    "dora": LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, trainable_token_indices=[7, 8, 9, 10]),
}


# Where they are not tied, rows of the embedding and of the head may differ.
CONFIGS = {
    **TIED_CONFIGS,
    "both": LoraConfig(**QUERIES, trainable_token_indices={"lm_head": [1, 2], "embed_tokens": [4]}),
}


OF_TYPE = {
    "some": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[*range(0, 97, 3)]),
    "plain": LoraConfig(r=2, target_modules="all-linear"),
    "others": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[*range(1, 97, 2)]),
    "late": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[*range(2, 97, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("base", [tied_llama, tiny_gpt2])
def test_trainable_tokens_reach_a_head_that_is_tied_to_the_embedding(base: Callable[[], Any], tmp_path: Path) -> None:
    configs = copy.deepcopy(OF_TYPE)
    if base is tiny_gpt2:
        for config in (configs[name] for name in ("some", "others", "late")):
            config.target_modules = ["wte"]
    ran = together(configs, base, tmp_path, late=["late"], max_steps=3)
    for name in configs:
        assert ran.saved(name).keys() == ran.saved_alone(ran.assert_as_alone(name)).keys()
    ran.assert_backbone_unchanged()
    again = MultiTaskPeftModel.from_pretrained(base(), ran.folder, verify=False)
    for name in configs:
        assert_same_tensors(again.task_parameters(name), ran.run.weights(name), name)
    assert_nan_stays(again, batch_of(again.tasks), "some")
    again.remove_tasks(["some"])
    back = again.unload()
    assert_same_tensors(back.state_dict(), base().state_dict())
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


def batch_of(names: Iterable[str]) -> Any:
    return ChunkPackingCollator()([{"task": name, "input_ids": [4, 7, *TOKENS, 9]} for name in names])


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([1, 1], "different numbers of tokens"),
        ({}, "different numbers of tokens"),
        ((1, 2), "a list of integers of at least 0"),
        ([-1], "a list of integers of at least 0"),
        ({"embed_tokens": [True]}, "a list of integers of at least 0"),
        ([97], "numbers of tokens below 97"),
        ({"norm": [1]}, "the input embedding or the output head"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(indices: Any, said: str) -> None:
    config = LoraConfig(**QUERIES, trainable_token_indices=indices)
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.trainable_token_indices.*{said}")


def test_copy_and_rows_of_one_module_are_refused() -> None:
    config = LoraConfig(**QUERIES, trainable_token_indices=[1], modules_to_save=["embed_tokens"])
    assert_refused({"a": config}, r"tasks\.a\.peft_config\.trainable_token_indices must be a module that is not in")
