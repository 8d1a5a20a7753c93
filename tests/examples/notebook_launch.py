"""Trains as a cell of a notebook does that starts several processes.

Run as `python examples_notebook_launch.py FOLDER PORT`, with a folder that holds `tasks.yaml`.
"""

from __future__ import annotations

import sys

from accelerate import notebook_launcher


def train(folder: str) -> None:
    """Train the tasks of a folder's file; runs in every process, and imports there."""
    from peft_mux.cli.config_file import read_config
    from peft_mux.trainer.trainer import MultiTaskTrainer

    config = read_config(f"{folder}/tasks.yaml", [f"output_dir={folder}/notebook"])
    trainer = MultiTaskTrainer(config.model, config.args, config.tasks)
    trainer.train()


if __name__ == "__main__":
    notebook_launcher(train, args=(sys.argv[1],), num_processes=2, use_port=sys.argv[2])
