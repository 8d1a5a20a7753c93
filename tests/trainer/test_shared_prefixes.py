"""Runs whose rows have common beginnings: as plain PEFT has them, as without sharing, and what they say of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from peft_mux import Task
from peft_mux.engine.executor import Executor
from tests.invariants import mux_lab as lab
from tests.records import run_records
from tests.runs import folder_of, task_of

SHOTS = np.random.default_rng(9).integers(1, lab.VOCABULARY, size=24).tolist()


def few_shot(seed: int, count: int = 12) -> list[dict[str, list[int]]]:
    """Return rows that begin with the same 24 tokens; every third continues with 17 more that others share."""
    rng = np.random.default_rng(seed)
    more = rng.integers(1, lab.VOCABULARY, size=17).tolist()
    own = [rng.integers(1, lab.VOCABULARY, size=int(size)).tolist() for size in rng.integers(1, 9, size=count)]
    return [{"input_ids": [*SHOTS, *(more if index % 3 == 0 else []), *rest]} for index, rest in enumerate(own)]


def task(name: str, rows: list[dict[str, Any]], **settings: Any) -> Task:
    return task_of(name, rows, **{"train_batch_size": 6, "max_steps": 6, **settings})


def tasks() -> list[Task]:
    packed = {"packing": True, "max_length": 90, "train_batch_size": 2}
    return [task("a", few_shot(1)), task("b", lab.rows(2, 10, 5, 15)), task("c", few_shot(3), **packed)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """Return a run that shares and is never interrupted."""
    return lab.train(tasks(), tmp_path_factory.mktemp("whole"), logging_strategy="steps")


def test_each_task_is_trained_as_plain_peft_does_and_each_shared_token_is_computed_once(
    whole: lab.Run, tmp_path: Path
) -> None:
    lab.assert_as_judged(whole, {one.name: lab.judge(whole.trainer, one) for one in tasks()})
    found = {line["task"]: line for line in run_records(folder_of(whole), "sharing")}
    assert found.keys() == {"a", "c"}
    for line in found.values():
        assert line["computed_tokens"] < 0.6 * line["asked_tokens"]
    lines = str(lab.make_trainer(tasks(), tmp_path).plan()).splitlines()
    assert {line.split()[0] for line in lines if "prefix sharing: computes" in line} == found.keys()


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """Return a run that does not share, in whole steps."""
    folder = tmp_path_factory.mktemp("unshared")
    return lab.train(tasks(), folder, share_prefixes=False, logging_strategy="steps")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_micro_batches": 3, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"split_long_sequences": True, "max_tokens_per_micro_batch": 42, "chunk_size": 4},
    ],
    ids=str,
)
def test_shared_is_unshared_however_steps_are_cut(settings: dict[str, Any], unshared: lab.Run, tmp_path: Path) -> None:
    shared = lab.train(tasks(), tmp_path, share_prefixes=True, logging_strategy="steps", **settings)
    for name in "ac":
        lab.assert_same(shared, unshared, name, 1e-5)
    assert run_records(tmp_path, "sharing") != run_records(folder_of(unshared), "sharing") == []


def test_an_evaluation_shares_and_comes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [task("a", few_shot(1), eval_dataset=few_shot(4))]
    seen: list[tuple[int, int]] = []
    plain = Executor.forward_sums

    def looking(self: Executor, micro_batches: Any) -> Any:
        seen.extend((one.num_computed, one.num_tokens) for one in micro_batches)
        return plain(self, micro_batches)

    monkeypatch.setattr(Executor, "forward_sums", looking)
    found = []
    for share in (True, False):
        trainer = lab.make_trainer(own, tmp_path / str(share), share_prefixes=share)
        found.append(trainer.evaluate("a")["a/eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert [computed < asked for computed, asked in seen] == [True, False]


# --------------------------------------------------------- where it is not done


def remarks(trainer: Any) -> dict[str, str]:
    return {run.name: run.sharing_remark for run in trainer.table}


def test_rows_that_share_no_prefix_have_the_bits_of_a_run_that_never_looks_and_reports_it_only_when_asked(
    tmp_path: Path,
) -> None:
    own = [task("a", lab.rows(2, 10, 20, 30)), task("b", lab.rows(4, 10, 5, 15))]
    looks, never = (lab.train(own, tmp_path / str(share), share_prefixes=share) for share in ("auto", False))
    for name in "ab":
        lab.assert_bit_identical(looks, never, name)
    dropped = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    own = [task("a", lab.rows(2, 10, 20, 30), config=dropped)]
    remarked = [remarks(lab.make_trainer(own, tmp_path, share_prefixes=share))["a"] for share in ("auto", True, False)]
    assert [bool(text) for text in remarked] == [False, True, False]


@pytest.mark.slow
def test_learnt_prompts_and_adapters_with_dropout_do_not_share_and_are_next_to_tasks_that_do(tmp_path: Path) -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, tokenizer_name_or_path="none")
    drops = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    own = [task("prompt", few_shot(1), config=prompt), task("drops", few_shot(1), config=drops)]
    own.append(task("plain", few_shot(2)))
    plan = str(lab.make_trainer(own, tmp_path / "plan").plan())
    assert "drops: shared prefixes are computed for each row, because its lora_dropout=0.1" in plan
    shared, unshared = (lab.train(own, tmp_path / str(share), share_prefixes=share) for share in (True, False))
    assert "its rows begin with a learnt prompt" in remarks(shared.trainer)["prompt"]
    assert [run.loader.shares_prefixes for run in shared.trainer.table] == [False, False, True]
    for name in ("prompt", "drops", "plain"):
        lab.assert_same(shared, unshared, name, 1e-5)


def test_a_backbone_with_dropout_and_one_that_looks_ahead_share_nothing(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": lab.VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    for dropout in (0.1, 0.0):
        off: dict[str, Any] = {"embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **off))
        trainer = lab.make_trainer([task("a", few_shot(1), config=config)], tmp_path, model=model)
        assert ("the backbone's own dropout" in remarks(trainer)["a"]) == bool(dropout)
        assert trainer.table["a"].loader.shares_prefixes == (not dropout)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=lab.VOCABULARY, **sizes, **off))
    rows = [{**row, "label": index % 2} for index, row in enumerate(few_shot(1))]
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    trainer = lab.make_trainer([task("a", rows, config=config)], tmp_path, model=model)
    assert "every token of BertForSequenceClassification sees later ones" in remarks(trainer)["a"]


def test_what_plans_look_at_leaves_the_order_of_rows_alone_and_streams_where_they_are(tmp_path: Path) -> None:
    plain, streamed = task("a", few_shot(1)), task("b", few_shot(2))
    stream = Dataset.from_list(few_shot(2)).to_iterable_dataset()
    trainer = lab.make_trainer([plain, replace(streamed, train_dataset=stream)], tmp_path)
    for run in trainer.table:
        (first, *_), later = run.loader.sample_batches(3), run.loader.batch(3)
        assert first.trie is not None
        assert [row.row for row in first.sequences] == [row.row for row in run.loader.batch(0).sequences]
        assert run.loader.batch(3).step == later.step == 3
    assert "b" in {line.split()[0] for line in str(trainer.plan()).splitlines() if "prefix sharing: computes" in line}
