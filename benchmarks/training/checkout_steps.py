"""One of the two processes of `benchmarks.training.checkouts`: trains with one checkout's package, a step at a time.

    python -P checkout_steps.py CHECKOUT ROOT MIX [SHAPE LAYERS]

The package is imported from CHECKOUT, the workload from the benchmarks in ROOT. Each line that is read starts a step;
each line that is written has its processor seconds, and the last one the final loss of each task, to the last bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from typing import Any


def main() -> None:
    """Train as many steps as the first line that is read says."""
    checkout, root, mix, *shape = sys.argv[1:]
    # What a run prints goes elsewhere than the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    # The package comes first: next to the benchmarks of ROOT there is another one.
    sys.path.insert(0, checkout)
    import peft_mux

    assert str(peft_mux.__file__).startswith(checkout), f"{peft_mux.__file__} is not of {checkout}"
    sys.path.insert(0, root)
    import torch
    from transformers import TrainerCallback

    from benchmarks.training.mux import trainer_for
    from benchmarks.training.workloads import ModelSpec, make_workload

    class InTurn(TrainerCallback):
        """Waits for its turn before each step."""

        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            input()
            self.started_s = time.process_time()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            print(json.dumps(time.process_time() - self.started_s), file=answers, flush=True)

    torch.set_num_threads(1)
    model = ModelSpec.of_shape(shape[0], int(shape[1])) if shape else ModelSpec()
    workload = make_workload(mix, num_tasks=8, num_steps=int(input()), vocab_size=model.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(model.build, workload, folder, record_losses=False)
        trainer.add_callback(InTurn())
        trainer.train()
    print(json.dumps([float(run.last_loss).hex() for run in trainer.table]), file=answers, flush=True)


if __name__ == "__main__":
    main()
