"""TRL's trainers compared with this package's: one tiny Llama, one tokenizer, the same rows in the same order, fp32."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.demo.small_llama import make_tokenizer
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab

STEPS, BATCH, RATE, SEED = 5, 4, 2e-3, 3
WORDS = "the sky is blue and the grass is green but snow is white while night is black as coal".split()
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<a>"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<u>{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@cache
def tokenizer() -> Any:
    """Return a small tokenizer with a chat template that marks what the assistant says."""
    made = make_tokenizer([" ".join(WORDS)] * 20)
    made.chat_template = TEMPLATE
    return made


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
    )


@cache
def _language_model() -> Any:
    model = LlamaForCausalLM(_config())
    lab.fill(model, 0)
    return model


@cache
def _classifier() -> Any:
    config = _config()
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    lab.fill(model, 0)
    return model


def backbone(*, is_classifier: bool = False) -> Any:
    """Return a fresh copy of the language model, or of the classifier with one output."""
    return copy.deepcopy(_classifier() if is_classifier else _language_model())


def adapter(*, is_classifier: bool = False) -> LoraConfig:
    """Return the adapter that both train."""
    if is_classifier:
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="SEQ_CLS")
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def words(seed: int, low: int, high: int) -> str:
    """Return some words, separated by spaces."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(low, high + 1, (1,), generator=generator))
    return " ".join(WORDS[int(place)] for place in torch.randint(0, len(WORDS), (count,), generator=generator))


def pairs(count: int = 18) -> list[dict[str, Any]]:
    """Return rows of a prompt, a chosen and a rejected answer of unequal lengths."""
    return [
        {
            "prompt": words(3 * place, 1, 7),
            "chosen": " " + words(3 * place + 1, 1, 9),
            "rejected": " " + words(3 * place + 2, 1, 9),
        }
        for place in range(count)
    ]


def answers(count: int = 18) -> list[dict[str, Any]]:
    """Return rows of a prompt, one answer and a verdict."""
    verdicts = [True, False, True, True, False, False, True, False]
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": verdicts[place % len(verdicts)]}
        for place, row in enumerate(pairs(count))
    ]


@dataclass
class Outcome:
    """A finished run: losses and metrics of each step, metrics of held-out rows, weights by PEFT's names."""

    losses: list[float]
    metrics: list[Mapping[str, float]]
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)


def config_of(kind: type[Any], folder: Path, **options: Any) -> Any:
    """Return the arguments of a trainer of TRL for the runs that are compared."""
    common = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "sequential",
        "seed": SEED,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return kind(**{**common, **options})


def trl_outcome(
    trainer: type[Any],
    config: type[Any],
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    is_classifier: bool = False,
    held_out: Sequence[Mapping[str, Any]] = (),
    reward_funcs: Any = None,
    start: Path | None = None,
    compute_metrics: Any = None,
    **options: Any,
) -> Outcome:
    """Train with a trainer of TRL on rows in their order, from an adapter that is drawn or from a saved one."""
    losses: list[float] = []
    functions = {"reward_funcs": reward_funcs, "compute_metrics": compute_metrics}

    class Recording(trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    args = config_of(config, folder / "trl", **options)
    model = backbone(is_classifier=is_classifier)
    if start is not None:
        model = PeftModel.from_pretrained(model, str(start), is_trainable=True)
    made = Recording(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        eval_dataset=Dataset.from_list([dict(row) for row in held_out]) if held_out else None,
        processing_class=copy.deepcopy(tokenizer()),
        peft_config=adapter(is_classifier=is_classifier) if start is None else None,
        **{name: value for name, value in functions.items() if value is not None},
    )
    trained = trained_parameters(made.model)
    initial = {name: value.detach().clone() for name, value in trained.items()}
    if start is None:
        initial = initial_weights(is_classifier=is_classifier)
    assert trained.keys() == initial.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(initial[name])
    made.train()
    metrics = [entry for entry in made.state.log_history if "loss" in entry]
    count = len(losses)
    evaluated = made.evaluate() if held_out else {}
    final = {name: value.detach() for name, value in trained.items()}
    return Outcome(losses[:count], metrics, final, initial, evaluated)


def answer_metrics(prediction: Any) -> dict[str, float]:
    """Return figures of each row of predictions and labels in its place, without what fills rows up."""
    labels, logits = (torch.from_numpy(one) for one in (prediction.label_ids, prediction.predictions))
    is_token = (labels != -100) & (labels != tokenizer().pad_token_id)
    places = torch.arange(1, len(labels) + 1)[:, None].expand_as(labels)[is_token]
    words = logits[is_token].double().log_softmax(-1).gather(1, labels[is_token][:, None])[:, 0]
    return {"rows": len(labels), "ids": (places * labels[is_token]).sum(), "words": (places * words).sum()}


def rollouts() -> list[dict[str, Any]]:
    """Return a prompt with a sampled answer and its advantage, enough of them for all steps."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(STEPS * BATCH):
        prompt, answer = (int(torch.randint(1, 7, (1,), generator=generator)) for _ in range(2))
        ids = torch.randint(3, len(tokenizer()), (prompt + answer,), generator=generator).tolist()
        labels = [-100] * prompt + ids[prompt:]
        advantage = float(torch.randn(1, generator=generator))
        found.append({"input_ids": ids, "labels": labels, "advantages": advantage})
    return found


def grpo_outcome(rows: Sequence[Mapping[str, Any]], folder: Path, **options: Any) -> Outcome:
    """Train with TRL's `GRPOTrainer` on rollouts that are given in the place of those that it would sample."""
    import trl

    class Given(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            chosen = rows[self.state.global_step * BATCH :][:BATCH]
            starts = [row["labels"].count(-100) for row in chosen]
            prompts = [torch.tensor(row["input_ids"][:start]) for row, start in zip(chosen, starts, strict=True)]
            answers = [torch.tensor(row["input_ids"][start:]) for row, start in zip(chosen, starts, strict=True)]
            prompt_ids, prompt_mask = _padded(prompts, side="left")
            ids, mask = _padded(answers, side="right")
            found = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids}
            found |= {"completion_mask": mask, "advantages": torch.tensor([row["advantages"] for row in chosen])}
            found["num_items_in_batch"] = mask.sum()
            if self.beta:
                whole = torch.cat([prompt_ids, ids], dim=1), torch.cat([prompt_mask, mask], dim=1)
                model: Any = self.model
                with torch.no_grad(), model.disable_adapter():
                    found["ref_per_token_logps"] = self._get_per_token_logps_and_entropies(
                        self.model, *whole, ids.shape[1]
                    )[0]
            return found

    prompts = [{"prompt": "the sky"} for _ in rows]
    settings = {"num_generations": 2, "max_completion_length": 8, "reward_funcs": _no_reward, **options}
    return trl_outcome(Given, trl.GRPOConfig, prompts, folder, **settings)


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _padded(parts: Sequence[torch.Tensor], *, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ones = [torch.ones_like(part) for part in parts]
    pad = torch.nn.utils.rnn.pad_sequence
    return tuple(pad(list(own), batch_first=True, padding_side=side) for own in (parts, ones))  # type: ignore[return-value]


def initial_weights(*, is_classifier: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights that an adapter begins with, as plain PEFT draws them from the seed."""
    torch.manual_seed(SEED)
    model = get_peft_model(backbone(is_classifier=is_classifier), adapter(is_classifier=is_classifier))
    return {name: value.detach().clone() for name, value in trained_parameters(model).items()}


def trained_adapter(folder: Path) -> Path:
    """Save an adapter that is not as it was drawn, with plain PEFT, and return its folder."""
    torch.manual_seed(SEED)
    model = get_peft_model(backbone(), adapter())
    with torch.no_grad():
        for value in trained_parameters(model).values():
            value.add_(0.05 * torch.randn_like(value))
    model.save_pretrained(str(folder))
    return folder


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by PEFT's names without the adapter's."""
    return {name.replace(".default", ""): value for name, value in model.named_parameters() if value.requires_grad}


def task(name: str, rows: Sequence[Mapping[str, Any]], *, is_classifier: bool = False, **settings: Any) -> Task:
    """Return a task with the hyper-parameters of the runs of TRL."""
    options: dict[str, Any] = {
        "train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "seed": SEED,
        "shuffle": False,
        **settings,
    }
    if "init_adapter" not in settings:
        options["peft_config"] = adapter(is_classifier=is_classifier)
    return Task(name=name, train_dataset=[dict(row) for row in rows], **options)


def our_outcomes(
    tasks: Sequence[Task], folder: Path, *, is_classifier: bool = False, **arguments: Any
) -> dict[str, Outcome]:
    """Train tasks together with this package, and return what became of each."""
    recorder = lab.Recorder()
    args = MultiTaskTrainingArguments(
        output_dir=str(folder / "ours"),
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        per_device_eval_batch_size=BATCH,
        **arguments,
    )
    trainer = MultiTaskTrainer(
        backbone(is_classifier=is_classifier), args, list(tasks), processing_class=tokenizer(), callbacks=[recorder]
    )
    recorder.trainer = trainer
    trainer.train()
    evaluated = trainer.evaluate() if any(one.eval_dataset is not None for one in tasks) else {}
    return {
        one.name: Outcome(
            recorder.losses[one.name],
            [entry for entry in trainer.task_states[one.name].log_history if "loss" in entry],
            lab.weights(trainer, one.name),
            recorder.before[one.name][0],
            {
                key.removeprefix(f"{one.name}/"): value
                for key, value in evaluated.items()
                if key.startswith(f"{one.name}/")
            },
        )
        for one in tasks
    }


def assert_same(ours: Outcome, theirs: Outcome, metrics: Sequence[str] = ()) -> None:
    """Assert equal losses and metrics at every step and of held-out rows, equal final weights, and that they moved."""
    lab.assert_close(ours.losses, theirs.losses, 1e-4, "loss")
    assert len(ours.metrics) == len(theirs.metrics) == STEPS
    for step, (own, other) in enumerate(zip(ours.metrics, theirs.metrics, strict=True)):
        for name in metrics:
            assert (name in own) == (name in other), f"{name} at step {step}"
            if name in other:
                assert abs(own[name] - other[name]) <= 1e-4 * max(1.0, abs(other[name])), f"{name} at step {step}"
    if theirs.evaluated:
        for name in ("loss", *metrics):
            held_out = ours.evaluated[f"eval_{name}"], theirs.evaluated[f"eval_{name}"]
            assert abs(held_out[0] - held_out[1]) <= 1e-4 * max(1.0, abs(held_out[1])), f"{name} of held-out rows"
    assert ours.weights.keys() == theirs.weights.keys()
    for key, weight in theirs.weights.items():
        assert torch.equal(ours.initial[key], theirs.initial[key]), f"{key} begins elsewhere"
        assert lab.relative(ours.weights[key], weight) <= 1e-4, f"{key}: {lab.relative(ours.weights[key], weight)}"
    assert any(lab.relative(weight, theirs.initial[key]) > 1e-3 for key, weight in theirs.weights.items())
