"""Three LoRA adapters trained together on one frozen model, in half a minute on a CPU.

python examples/quickstart.py                          # makes a small Llama itself: no network, no GPU
python examples/quickstart.py --model Qwen/Qwen3-0.6B  # any causal language model of the hub, or a folder
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.demo.small_model import save_small_model
from peft_mux.demo.task_rows import demo_tasks, exact_match, last_token_ids


def main(model: str | None, output_dir: Path, max_steps: int) -> None:
    if model is None:
        model = str(output_dir / "backbone")
        save_small_model(model)

    # 1. Say what to train: a name, an adapter and rows ({"prompt": ..., "completion": ...}) for each task.
    tasks = [
        Task(
            name=rows.name,
            peft_config=LoraConfig(r=rows.rank, lora_alpha=2 * rows.rank, target_modules="all-linear"),
            train_dataset=rows.train_rows,
            eval_dataset=rows.eval_rows,
            train_batch_size=16,
            learning_rate=5e-3,
            compute_metrics=exact_match,
            preprocess_logits_for_metrics=last_token_ids,
        )
        for rows in demo_tasks()
        if rows.name in ("mood", "kind", "action")
    ]

    # 2. Train all of them at once. The plan shows what runs together before any weight is loaded.
    args = MultiTaskTrainingArguments(output_dir=str(output_dir / "run"), max_steps=max_steps, logging_steps=20)
    trainer = MultiTaskTrainer(model, args, tasks)
    print(trainer.plan())
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()

    # 3. See what they have learned on rows that were held out.
    for task in tasks:
        loss, accuracy = f"{task.name}/eval_loss", f"{task.name}/eval_accuracy"
        print(
            f"{task.name:<10} held out: loss {before[loss]:.3f} -> {after[loss]:.3f}, "
            f"right answers {before[accuracy]:.0%} -> {after[accuracy]:.0%}"
        )

    # 4. What was saved is an ordinary PEFT adapter; nothing of peft_mux is needed to use it.
    adapter, row = output_dir / "run" / tasks[0].name, tasks[0].eval_dataset[0]
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()
    prompt = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        answer = plain.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"plain PEFT loads {adapter}")
    print(f"  {row['prompt']!r} -> {tokenizer.decode(answer, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; by default a small Llama is made")
    parser.add_argument("--output-dir", type=Path, default=Path(f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--max-steps", type=int, default=80, help="of each task")
    arguments = parser.parse_args()
    main(arguments.model, arguments.output_dir, arguments.max_steps)
