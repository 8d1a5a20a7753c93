"""Evaluations that generate: metrics of completions, of all tasks at once, and one task's fault stays its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig

from peft_mux import ConfigError, DataError, EarlyStopping, GenerateOptions, MultiTaskPeftModel
from peft_mux.generation import held_out_completions as generated
from tests.data.test_tokenize import words_tokenizer
from tests.engine.processes.cases import launch, values
from tests.evaluation import generation_cases as cases
from tests.invariants import mux_lab as lab


def test_completions_of_all_tasks_come_from_one_call_and_are_judged_as_plain_peft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[set[str]] = []
    original = generated.generate

    def counted(model: MultiTaskPeftModel, requests: Any, **settings: Any) -> Any:
        calls.append({request.task for request in requests})
        return original(model, requests, **settings)

    monkeypatch.setattr(generated, "generate", counted)
    trainer = cases.trainer([cases.task(name) for name in cases.WANTED], tmp_path / "run")
    trainer.train()
    assert calls == [set(cases.WANTED)] * 3
    trainer.save_model(str(tmp_path / "saved"))
    tokenizer = words_tokenizer()
    for name in cases.WANTED:
        plain = PeftModel.from_pretrained(lab.tiny_llama(), str(tmp_path / "saved" / name)).eval()
        texts = []
        for row in cases.rows(name):
            ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
            out = plain.generate(input_ids=ids, do_sample=False, max_new_tokens=6, eos_token_id=[1, 2], pad_token_id=0)
            texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        wanted = {
            f"eval_{metric}": generated.mean_metric(metric, texts, [row["completion"] for row in cases.rows(name)])
            for metric in ("exact_match", "contains", "f1")
        }
        last = cases.evaluations(trainer, name)[-1]
        assert {key: last[key] for key in wanted} == wanted
        # All answers are learnt but that of the last row, which contradicts the first.
        assert last["eval_exact_match"] == pytest.approx(5 / 6)
        assert cases.evaluations(trainer, name)[0]["eval_loss"] > last["eval_loss"]
        shown = cases.completions(tmp_path / "run", name)
        assert [record["step"] for record in shown] == [4, 4, 8, 8, 12, 12]
        assert shown[-2]["prompt"] == cases.PROMPTS[0]
        assert (shown[-2]["completion"], shown[-2]["reference"]) == (texts[0], f" {cases.WANTED[name]}")
    evaluated = trainer.evaluate()
    assert evaluated["cats/eval_exact_match"] == pytest.approx(5 / 6)
    assert trainer.evaluate("dogs")["dogs/eval_f1"] == evaluated["dogs/eval_f1"]


def test_generating_changes_nothing_of_what_is_trained(tmp_path: Path) -> None:
    digests = []
    for name, given in (("with", GenerateOptions(max_new_tokens=5, do_sample=True)), ("without", None)):
        trainer = cases.trainer([cases.task("cats", eval_generate=given, max_steps=5)], tmp_path / name)
        trainer.train()
        digests.append({key: value.tolist() for key, value in lab.weights(trainer, "cats").items()})
    assert digests[0] == digests[1]


def test_a_metric_of_the_users_that_fails_ends_its_task_alone(tmp_path: Path) -> None:
    seen = cases.train(0, tmp_path, {})
    assert seen["statuses"]["cats"] == ("succeeded", "")
    assert seen["statuses"]["dogs"] == ("failed", "evaluation failed: ValueError: no more")
    assert [set(one) for one in seen["evaluations"]["dogs"]] == [
        {"eval_loss", "eval_perplexity", "eval_rows", "eval_f1"}
    ] * 2
    assert seen["evaluations"]["dogs"][0]["eval_rows"] == 6
    assert len(seen["evaluations"]["cats"]) == 3


def test_rows_messages_and_number_of_rows_are_as_asked(tmp_path: Path) -> None:
    chat = [
        {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat home"}]},
        {"messages": [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "ran"}]},
    ]
    tokenizer = words_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    options = GenerateOptions(max_new_tokens=3, num_rows=1, num_logged=0, metrics="f1")
    settings: dict[str, Any] = {"train_dataset": chat, "eval_dataset": chat, "eval_generate": options}
    trainer = cases.trainer([cases.task("cats", **settings, max_steps=4)], tmp_path, tokenizer=tokenizer)
    assert len(trainer.table["cats"].eval_prompts) == 1
    trainer.train()
    assert set(cases.evaluations(trainer, "cats")[0]) == {"eval_loss", "eval_perplexity", "eval_f1"}
    assert cases.completions(tmp_path, "cats") == []


def test_tasks_with_learnt_prompts_generate_next_to_others(tmp_path: Path) -> None:
    kinds = {"cats": PromptTuningConfig, "dogs": PrefixTuningConfig}
    learnt = {name: kind(task_type="CAUSAL_LM", num_virtual_tokens=3) for name, kind in kinds.items()}
    trainer = cases.trainer([cases.task(name, peft_config=learnt[name], max_steps=4) for name in kinds], tmp_path)
    trainer.train()
    assert all("eval_exact_match" in cases.evaluations(trainer, name)[0] for name in kinds)


def test_early_stopping_may_follow_what_is_generated_and_a_resumed_run_may_generate_otherwise(tmp_path: Path) -> None:
    rule = EarlyStopping(metric="eval_exact_match", patience=1)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    tasks = [cases.task("cats", early_stopping=rule, max_steps=40), cases.task("dogs", max_steps=4)]
    trainer = cases.trainer(tasks, tmp_path, **saving)
    trainer.train()
    assert trainer.task_statuses == {"cats": "stopped_early", "dogs": "succeeded"}
    assert trainer.table["cats"].best.value == pytest.approx(5 / 6)
    changed = cases.task("dogs", max_steps=4, eval_generate=GenerateOptions(max_new_tokens=2))
    again = cases.trainer([tasks[0], changed], tmp_path, **saving)
    again.train(resume_from_checkpoint=True)
    assert "dogs/eval_f1" not in again.evaluate("dogs")
    assert cases.task("cats", eval_generate=True).generate_options == GenerateOptions()
    assert cases.task("cats", eval_generate=False, eval_dataset=None, eval_steps=None).generate_options is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eval_generate": {"max_new_tokens": 3}}, "Write GenerateOptions(**options)."),
        ({"eval_generate": 3}, "tasks.cats.eval_generate must be True, False, or GenerateOptions(max_new_tokens=...,"),
        ({"eval_dataset": None}, ("tasks.cats.eval_generate must be None if eval_dataset is not set, got")),
        ({"peft_config": LoraConfig(task_type="SEQ_CLS")}, "None for sequence classification"),
        (
            {"early_stopping": EarlyStopping(metric="eval_f2")},
            "eval_loss or eval_perplexity or eval_exact_match or eval_contains or eval_f1",
        ),
    ],
)
def test_a_task_that_cannot_generate_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cases.task("cats", **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({"eval_dataset": [{"text": "the cat"}]}, {}, 'tasks.cats.eval_generate needs held-out rows with "prompt"'),
        ({}, {"shard_backbone": True}, "tasks.cats.eval_generate must be None if a process holds only a part of the"),
        ({"eval_generate": GenerateOptions(max_new_tokens=63)}, {}, "tasks.cats.eval_generate needs held-out"),
    ],
)
def test_a_run_that_cannot_generate_is_refused_when_it_is_made(
    settings: dict[str, Any], arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        cases.trainer([cases.task("cats", **settings)], tmp_path, **arguments)
    assert said in str(caught.value)


def test_prompts_that_are_too_long_are_left_out_with_a_warning(tmp_path: Path) -> None:
    options = GenerateOptions(max_new_tokens=60)
    with pytest.warns(UserWarning, match=r"tasks\.cats\.eval_generate: 1 held-out prompts left out"):
        trainer = cases.trainer([cases.task("cats", eval_generate=options)], tmp_path)
    assert len(trainer.table["cats"].eval_prompts) == 5


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_share_the_prompts_and_see_the_same_metrics(tmp_path: Path) -> None:
    alone = cases.train(0, tmp_path / "alone", {})
    parts = values(launch(2, cases.train, tmp_path / "parts", {}, limit_s=120))
    for part in parts:
        assert part["evaluations"] == parts[0]["evaluations"]
        assert part["evaluated"] == parts[0]["evaluated"]
        assert part["statuses"] == alone["statuses"]
        for name, wanted in alone["evaluations"].items():
            for found, one in zip(part["evaluations"][name], wanted, strict=True):
                assert found == pytest.approx(one, rel=1e-4)
