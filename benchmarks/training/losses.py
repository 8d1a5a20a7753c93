"""Times each loss: four tasks of it in one run of this package, next to TRL's trainer for one task after another.

python -m benchmarks.training.losses                       about 5 minutes on one core; needs trl

Both take the same rows in the same order in fp32, and the first loss of every task is checked to be the same. A process
of its own runs each contender, on one thread. Seconds are those of the processor for a step of all four tasks, the
least of all steps but the first, from the end of the one before; memory is what the process needs at most beyond what
it held when training began.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import cache
from typing import Any

import torch

from benchmarks.harness import Table, hand_over, in_own_process, require_equal_losses
from benchmarks.paths import SHARED_DATA
from benchmarks.stored import write_result
from benchmarks.training.audit import measured_peak
from benchmarks.training.baselines.hf_trainer import RecordsLosses, StepClock
from benchmarks.training.mux import quiet_arguments
from benchmarks.training.timing import use_clock

LOSSES = ("sft", "dpo", "orpo", "kto", "reward")
NUM_TASKS, BATCH, STEPS, RATE, MAX_LENGTH = 4, 4, 4, 1e-3, 256


def main() -> None:
    """Run every loss with both contenders, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="which losses")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the Llama")
    parser.add_argument("--layers", type=int, default=6, help="its layers")
    parser.add_argument("--contender", choices=("ours", "trl"), help="run one of them, and print it as JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    use_clock("processor")
    if options.contender:
        hand_over((ours if options.contender == "ours" else in_turn)(options.losses[0], options))
        return
    print(f"{NUM_TASKS} tasks of {BATCH} rows, Llama {options.hidden_size} x {options.layers}, 1 thread, fp32")
    table = Table(
        "loss:<6", "peft_mux, s/step:>16.3f", "TRL in turn, s/step:>19.3f", "ratio:>5.2f", "peft_mux, MiB:>13.0f",
        "TRL, one task, MiB:>18.0f",
    )  # fmt: skip
    sizes = ["--hidden-size", str(options.hidden_size), "--layers", str(options.layers)]
    seconds_by_loss = {}
    for loss in options.losses:
        mine, theirs = (
            in_own_process("benchmarks.training.losses", "--contender", contender, "--losses", loss, *sizes)
            for contender in ("ours", "trl")
        )
        require_equal_losses(loss, mine["first_losses"], theirs["first_losses"])
        seconds_by_loss[loss] = {"peft_mux": mine, "trl": theirs}
        ratio = theirs["step_s"] / mine["step_s"]
        table.row(loss, mine["step_s"], theirs["step_s"], ratio, mine["mib"], theirs["mib"])
    if options.save:
        write_result("losses", {"losses": seconds_by_loss})


@cache
def texts() -> list[dict[str, str]]:
    """Return prompts with answers; made of words where real ones are absent."""
    path = SHARED_DATA / "text" / "openbookqa.train.jsonl"
    count = NUM_TASKS * BATCH * STEPS
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()[: 4 * count]
        return [json.loads(line) for line in lines]
    words = "the sky is blue and the grass is green but snow is white while night is black".split()
    return [{"prompt": " ".join(words[place % 7 : 12]), "completion": words[place % 15]} for place in range(4 * count)]


@cache
def tokenizer() -> Any:
    """Return a tokenizer made from the texts."""
    from peft_mux.demo.small_llama import make_tokenizer

    return make_tokenizer([row["prompt"] + row["completion"] for row in texts()])


def backbone(loss: str, options: argparse.Namespace) -> Any:
    """Return a small random Llama, the same at every call; with one output for rewards."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    return (LlamaForSequenceClassification if loss == "reward" else LlamaForCausalLM)(config)


def adapter(loss: str) -> Any:
    """Return the adapter of every task."""
    from peft import LoraConfig

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=8, target_modules=targets, task_type="SEQ_CLS" if loss == "reward" else "CAUSAL_LM")


def rows_of(loss: str, task: int) -> list[dict[str, Any]]:
    """Return the rows of a task, as many as its steps read."""
    given = texts()[task::NUM_TASKS][: BATCH * STEPS + 1]
    rows: list[dict[str, Any]] = []
    for place, row in enumerate(given[:-1]):
        good, bad = row["completion"], f"{given[place + 1]['completion']} {row['completion']}"
        if loss == "sft":
            rows.append({"prompt": row["prompt"], "completion": good})
        elif loss == "kto":
            answer = good if place % 2 else bad
            rows.append({"prompt": row["prompt"], "completion": answer, "label": bool(place % 2)})
        else:
            rows.append({"prompt": row["prompt"], "chosen": good, "rejected": bad})
    return rows


def ours(loss: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train all tasks together."""
    from peft_mux import MultiTaskTrainer, Task

    tasks = [
        Task(
            name=f"task{task}",
            peft_config=adapter(loss),
            train_dataset=rows_of(loss, task),
            train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            shuffle=False,
            max_length=MAX_LENGTH,
            objective=loss,
        )
        for task in range(NUM_TASKS)
    ]
    watch = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        args = quiet_arguments(folder, logging_strategy="steps", logging_steps=1)
        trainer = MultiTaskTrainer(
            backbone(loss, options), args, tasks, processing_class=tokenizer(), callbacks=[watch]
        )
        _, peak_bytes = measured_peak(trainer.train)
    first = [
        next(entry["loss"] for entry in trainer.task_states[task.name].log_history if "loss" in entry) for task in tasks
    ]
    return {"step_s": watch.least_s, "mib": peak_bytes / 2**20, "first_losses": first}


def in_turn(loss: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one task after another with TRL's trainer."""
    import trl
    from datasets import Dataset
    from trl.experimental import orpo

    home, name = (orpo, "ORPO") if loss == "orpo" else (trl, loss.upper() if loss != "reward" else "Reward")
    kind, config = getattr(home, f"{name}Trainer"), getattr(home, f"{name}Config")

    class Recording(RecordsLosses, kind):
        pass

    step_s, peaks_bytes, first = 0.0, [], []
    for task in range(NUM_TASKS):
        watch = StepClock()
        with tempfile.TemporaryDirectory() as folder:
            args = config(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                learning_rate=RATE,
                max_length=MAX_LENGTH,
                train_sampling_strategy="sequential",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = Recording(
                model=backbone(loss, options),
                args=args,
                train_dataset=Dataset.from_list(rows_of(loss, task)),
                processing_class=tokenizer(),
                peft_config=adapter(loss),
                callbacks=[watch],
            )
            peaks_bytes.append(measured_peak(trainer.train)[1])
        step_s += watch.least_s
        first.append(trainer.losses[0])
    # The first task counts: later ones begin with what it has left.
    return {"step_s": step_s, "mib": peaks_bytes[0] / 2**20, "first_losses": first}


if __name__ == "__main__":
    main()
