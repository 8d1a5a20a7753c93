"""Workers that torchrun restarts resume by themselves, and end with the bits of a run that was never killed."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pytest
from peft import LoraConfig

from peft_mux.cli.main import main
from peft_mux.errors import CheckpointError
from peft_mux.planning import planner
from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.engine.processes import cases
from tests.examples.test_launches import child_environment, free_port, write_tasks
from tests.invariants import mux_lab as lab

NAMES = ("one", "two")
NUM_STEPS, SAVE_STEPS = 60, 4
RECORD = re.compile(r"run-(\d+)\.json")


def saved_step(out: Path) -> int:
    """Return the step of the newest record of a run; 0 if there is none."""
    steps = [RECORD.fullmatch(path.name) for path in (out / "state").glob("run-*.json")]
    return max((int(found.group(1)) for found in steps if found), default=0)


# ------------------------------------------------------------------ one process, as a launcher would start it


def a_run(out: Path, max_steps: int = 4) -> MultiTaskTrainer:
    task = Task(
        name="one",
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        train_dataset=lab.rows(1, 6, 5, 9),
        train_batch_size=2,
        learning_rate=1e-2,
        max_steps=max_steps,
    )
    return lab.make_trainer([task], out, save_strategy="steps", save_steps=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"TORCHELASTIC_RUN_ID": "a-run"}, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_RESTART_COUNT": "1"}),
        (
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "a-run"},
            {"TORCHELASTIC_RESTART_COUNT": "1"},
        ),
    ],
    ids=["torchrun", "a requeued job of Slurm", "torchrun within Slurm"],
)
def test_a_run_that_the_same_launch_began_is_resumed_after_a_restart(
    before: dict[str, str], after: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environment, max_steps in ((before, 2), (after, 4)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        run = a_run(tmp_path, max_steps=max_steps)
        run.train()
    assert run.task_states["one"].global_step == 4


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCHELASTIC_RUN_ID": "a-run", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "another", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
    ],
)
def test_a_run_of_another_launch_is_still_refused(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "a-run")
        a_run(tmp_path, max_steps=2).train()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="holds a run"):
        a_run(tmp_path).train()


# ------------------------------------------------------------------ workers of torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, rows, and a file of two tasks."""
    return write_tasks(tmp_path_factory.mktemp("restarts"), num_steps=NUM_STEPS, run=f"save_steps: {SAVE_STEPS}")


def launch(folder: Path, out: Path, *, num_nodes: int) -> list[subprocess.Popen[str]]:
    """Start torchrun on each of some nodes, two workers in all."""
    environment = child_environment(folder)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", out.name)
    options = ("--nnodes", str(num_nodes), "--nproc-per-node", str(2 // num_nodes), "--max-restarts", "3", *meeting)
    train = ("-m", "peft_mux", "train", "tasks.yaml", "--set", f"output_dir={out}")
    command = [sys.executable, "-m", "torch.distributed.run", *options, *train]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for _ in range(num_nodes)]  # type: ignore[call-overload]


def kill_a_worker(agents: list[subprocess.Popen[str]], out: Path, at_step: int, rng: random.Random) -> None:
    """Kill one worker by SIGKILL, a moment after the state of a step has been saved."""
    ends = time.monotonic() + 120
    while saved_step(out) < at_step:
        assert time.monotonic() < ends, "the run does not get on"
        assert all(agent.poll() is None for agent in agents), "the run has ended"
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.05))
    workers = [child for agent in agents for child in psutil.Process(agent.pid).children()]
    rng.choice([one for one in workers if "peft_mux" in " ".join(one.cmdline())]).send_signal(signal.SIGKILL)


def bits_of(out: Path) -> dict[str, bytes]:
    return {name: (out / name / "adapter_model.safetensors").read_bytes() for name in NAMES}


def train_unharmed(rank: int, folder: Path, out: Path) -> dict[str, bytes]:
    """Train the tasks of a folder without a launcher, planned as under one; return the adapters."""
    planner.count_activation_bytes_per_token = count_activation_bytes_per_token
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    assert main(["train", str(folder / "tasks.yaml"), "--set", f"output_dir={out}"]) == 0
    return bits_of(out) if rank == 0 else {}


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "num_nodes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_a_worker_that_is_killed_is_restarted_and_the_run_ends_with_the_same_bits(num_nodes: int, folder: Path) -> None:
    rng, out = random.Random(num_nodes), folder / f"killed-{num_nodes}"
    agents = launch(folder, out, num_nodes=num_nodes)
    try:
        kill_a_worker(agents, out, 2 * SAVE_STEPS, rng)
        printed = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * num_nodes, printed[0][-4000:]
    assert saved_step(out) == NUM_STEPS
    unharmed = cases.values(cases.launch(2, train_unharmed, folder, folder / f"unharmed-{num_nodes}", limit_s=120))
    assert bits_of(out) == unharmed[0]


def test_resume_auto_of_the_command_line_begins_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    command = ["train", "--resume=auto", str(folder / "tasks.yaml"), "--set", f"output_dir={tmp_path / 'run'}"]
    assert main([*command, "--set", "defaults.max_steps=2"]) == 0
    assert main([*command, "--set", "defaults.max_steps=4"]) == 0
    assert saved_step(tmp_path / "run") == 4
