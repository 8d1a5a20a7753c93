"""Several saved adapters answer at once, on one frozen model: every prompt by the adapter of its task.

python examples/quickstart.py --output-dir runs/quick        # makes a model and three adapters: mood, kind, action
python examples/generate.py --model runs/quick/backbone --run runs/quick/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux import MultiTaskPeftModel, generate
from peft_mux.demo.task_rows import demo_tasks


def main(model: str, run: Path, num_prompts: int) -> None:
    # 1. One backbone, and every adapter of a run. During a run, `trainer.model` is such a model, too.
    tokenizer = AutoTokenizer.from_pretrained(model)
    mux_model = MultiTaskPeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), run)

    # 2. Prompts by task; all of them share batches, and each gets what plain PEFT would give it alone.
    held_out = {task.name: task.eval_rows[:num_prompts] for task in demo_tasks() if task.name in mux_model.tasks}
    prompts = {name: [row["prompt"] for row in rows] for name, rows in held_out.items()}
    completions = generate(mux_model, prompts, processing_class=tokenizer, max_new_tokens=5)

    # 3. One completion a prompt, in the same order, with log-probabilities of its tokens.
    rows = [row for task_rows in held_out.values() for row in task_rows]
    for row, completion in zip(rows, completions, strict=True):
        print(
            f"{completion.task:<8} {row['prompt']!r} -> {completion.text!r} (wanted {row['completion']!r}), "
            f"log-probability {sum(completion.logprobs):.3f}, {completion.finish_reason}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or folder of the backbone")
    parser.add_argument("--run", type=Path, required=True, help="folder of a run, with one adapter a task")
    parser.add_argument("--num-prompts", type=int, default=2, help="of each task")
    arguments = parser.parse_args()
    main(arguments.model, arguments.run, arguments.num_prompts)
