"""Ray Train: python examples/launch/ray_train.py /shared/tasks.yaml /shared/runs/a --num-workers 8 --use-gpu.

Needs `pip install "ray[train]"`, and peft_mux on every node. The file, its rows and the output folder must be on a disk
that all nodes share. Ray restarts all workers when one fails; `--resume=auto` then resumes the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_loop_per_worker(settings: dict[str, Any]) -> None:
    """Run one process of the training; Ray has set its rank and joined the process group.

    Your own script may build a `MultiTaskTrainer` here instead, and call `train(resume_from_checkpoint="auto")`.
    """
    from peft_mux.cli.main import main

    status = main(["train", "--resume=auto", settings["file"], "--set", f"output_dir={settings['output_dir']}"])
    if status not in (0, 1, 3):  # 1: a task failed, 3: a task is paused; the others have finished, so nothing to retry
        raise RuntimeError(f"peft_mux train ended with status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the tasks")
    parser.add_argument("output_dir", type=Path, help="folder of the run")
    parser.add_argument("--num-workers", type=int, default=2, help="processes on all nodes together")
    parser.add_argument("--use-gpu", action="store_true", help="a GPU for each process")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts")
    given = parser.parse_args()
    # Absolute, because workers run in folders of their own.
    file, output_dir = given.file.resolve(), given.output_dir.resolve()
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"file": str(file), "output_dir": str(output_dir)},
        torch_config=TorchConfig(backend="nccl" if given.use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.num_workers, use_gpu=given.use_gpu),
        run_config=RunConfig(
            name=output_dir.name,
            storage_path=str(output_dir.parent / "ray"),  # Ray's own records
            failure_config=FailureConfig(max_failures=given.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
