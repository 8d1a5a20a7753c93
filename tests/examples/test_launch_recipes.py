"""The recipes of examples/launch, as far as one machine allows: no cluster, no GPU.

Slurm's commands are replaced by small programs that start, signal and requeue processes of this machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from torch.distributed.run import get_args_parser

from peft_mux.cli.main import main
from tests.engine.processes import cases
from tests.engine.processes.test_restarts import SAVE_STEPS, bits_of, saved_step, train_unharmed
from tests.examples.test_launches import free_port, write_tasks
from tests.paths import ROOT

RECIPES = ROOT / "examples/launch"
NUM_STEPS = 100

# ------------------------------------------------------------------ Slurm

SCANCEL = """
import os, psutil, signal, sys
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
for line in open(os.environ["FAKES"] + "/pids"):
    process = psutil.Process(int(line))
    for one in [process, *process.children(recursive=True)]:  # Slurm signals all processes of a step
        one.send_signal(signal.SIGTERM)
"""
COMMANDS = {
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    # One task per node; the status is the last one that is not 0.
    "srun": 'for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & echo $! >> "$FAKES/pids"; done\n'
    'status=0; for pid in $(jobs -p); do wait "$pid" || status=$?; done; exit "$status"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; echo other; else echo "$@" >> "$FAKES/requeued"; fi',
    "scancel": f'exec "{sys.executable}" -c \'{SCANCEL}\' "$@"',
}


class Cluster:
    """Slurm's commands, in a folder that is first on PATH, and what they noted."""

    def __init__(self, folder: Path, **replaced: str) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in {**COMMANDS, **replaced}.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
            (folder / name).chmod(0o755)

    def start(
        self, job: int, *arguments: str, restarts: int = 0, cwd: Path | None = None, num_nodes: int = 2
    ) -> subprocess.Popen[str]:
        (self.folder / "pids").unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "FAKES": str(self.folder)}
        environment |= {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "64"}
        # Two workers in all.
        environment |= {"SLURM_JOB_NUM_NODES": str(num_nodes), "SLURM_GPUS_ON_NODE": str(2 // num_nodes)}
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        if cwd is not None:
            environment |= {"HF_HOME": str(cwd / "cache"), "HF_DATASETS_CACHE": str(cwd / "cache")}
        command = ["bash", str(RECIPES / "slurm.sh"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=cwd or self.folder, env=environment, **pipes)  # type: ignore[call-overload]

    def lines(self, name: str) -> list[str]:
        """Return what the commands noted: the processes that srun started in "pids", what is requeued in "requeued"."""
        return (self.folder / name).read_text(encoding="utf-8").splitlines() if (self.folder / name).exists() else []

    def kill(self) -> None:
        for pid in map(int, self.lines("pids")):
            if psutil.pid_exists(pid):
                for one in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                    one.kill()


def wait_until(condition: Any, job: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends, "nothing happens"
        assert job.poll() is None, job.communicate()[0][-4000:]
        time.sleep(0.005)


def test_a_job_that_fails_by_itself_keeps_its_status_and_is_not_requeued(tmp_path: Path) -> None:
    noted = 'echo "$SRUN_CPUS_PER_TASK $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$FAKES/noted"; exit 3'
    cluster = Cluster(tmp_path / "slurm", srun=noted)
    assert cluster.start(7).wait(60) == 3
    assert cluster.lines("requeued") == []
    assert cluster.lines("noted") == ["64 150"]


@pytest.mark.parametrize(("status", "requeued"), [(0, []), (1, ["requeue 7"])])
def test_a_job_that_is_interrupted_is_requeued_unless_it_has_finished(
    status: int, requeued: list[str], tmp_path: Path
) -> None:
    training = f'trap "sleep 0.2; exit {status}" TERM; echo $$ > "$FAKES/pids"; while true; do sleep 0.01; done'
    cluster = Cluster(tmp_path / "slurm", srun=training)
    job = cluster.start(7)
    try:
        wait_until(lambda: cluster.lines("pids"), job)
        time.sleep(0.5)  # until the script waits
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == status
    finally:
        cluster.kill()
    assert cluster.lines("requeued") == requeued


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, rows, and a file of two tasks."""
    return write_tasks(tmp_path_factory.mktemp("recipes"), num_steps=NUM_STEPS, run=f"save_steps: {SAVE_STEPS}")


def job_with_free_port() -> int:
    """Return a job whose port, by the script's formula, is free."""
    return int(free_port()) - 10_000


@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "num_nodes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_a_job_that_reaches_its_time_limit_is_requeued_and_resumes(
    num_nodes: int, folder: Path, tmp_path: Path
) -> None:
    cluster, out, job_id = Cluster(tmp_path / "slurm"), tmp_path / "interrupted", job_with_free_port()

    def start(restarts: int) -> subprocess.Popen[str]:
        arguments = ("tasks.yaml", "--set", f"output_dir={out}")
        return cluster.start(job_id, *arguments, restarts=restarts, cwd=folder, num_nodes=num_nodes)

    try:
        first = start(0)
        wait_until(lambda: saved_step(out) >= 2 * SAVE_STEPS, first)
        first.send_signal(signal.SIGUSR1)
        printed = first.communicate(timeout=200)[0]
        assert first.returncode != 0
        assert "interrupted by SIGTERM" in printed, printed[-4000:]
        assert cluster.lines("requeued") == [f"requeue {job_id}"]
        assert 2 * SAVE_STEPS <= saved_step(out) < NUM_STEPS

        requeued = start(1)
        printed = requeued.communicate(timeout=200)[0]
        assert requeued.returncode == 0, printed[-4000:]
    finally:
        cluster.kill()
    assert cluster.lines("requeued") == [f"requeue {job_id}"], "a job that has finished is requeued"
    assert saved_step(out) == NUM_STEPS
    unharmed = cases.values(cases.launch(2, train_unharmed, folder, tmp_path / "whole", limit_s=120))
    assert bits_of(out) == unharmed[0]


# ------------------------------------------------------------------ Kubernetes and SkyPilot


def recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a recipe says of its pods, and of the container in which torchrun runs."""
    spec = recipe(name)["spec"]
    if name == "jobset.yaml":
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return pod, pod["containers"][0]
    (patch,) = spec["runtimePatches"]
    jobs = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod, trainer = jobs[0]["template"]["spec"]["template"]["spec"], spec["trainer"]
    return pod, {**pod["containers"][0], **trainer, "resources": trainer["resourcesPerNode"]}


def command_of(container: dict[str, Any]) -> list[str]:
    return container["command"] + container["args"]


def skypilot_command(tmp_path: Path) -> list[str]:
    """Run the block `run` with a torchrun that prints its arguments; return them."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" torchrun "$@"\n', encoding="utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1"}
    environment = {**os.environ, **given, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    run = ["bash", "-euo", "pipefail", "-c", recipe("skypilot.yaml")["run"]]
    return subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml", "skypilot.yaml"])
def test_torchrun_and_peft_mux_accept_the_command(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = skypilot_command(tmp_path) if name == "skypilot.yaml" else command_of(pod_of(name)[1])
    assert words[0] == "torchrun"
    parsed = get_args_parser().parse_args(words[1:])
    assert (parsed.module, parsed.training_script, parsed.rdzv_backend) == (True, "peft_mux", "c10d")
    assert parsed.max_restarts > 0
    assert "--resume=auto" in parsed.training_script_args
    # The rest of the command begins a run, here with a short one of this machine, and then finds it finished.
    paths = {"/shared/tasks.yaml": str(folder / "tasks.yaml"), "output_dir=/shared/runs/a": f"output_dir={tmp_path}/a"}
    assert paths.keys() < set(parsed.training_script_args)
    given = [paths.get(word, word) for word in parsed.training_script_args]
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    for _ in range(2):
        assert main([*given, "--set", "defaults.max_steps=2"]) == 0
    assert saved_step(tmp_path / "a") == 2


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_pods_share_a_volume_have_time_to_save_and_meet_at_one_of_them_with_all_gpus(name: str) -> None:
    whole, (pod, container) = recipe(name), pod_of(name)
    words = command_of(container)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert "persistentVolumeClaim" in mounts["/shared"]
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert all(word.startswith("/shared/") for word in words if word.startswith("/"))
    parsed = get_args_parser().parse_args(words[1:])
    timeout_s = {one["name"]: one["value"] for one in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert pod["terminationGracePeriodSeconds"] > int(timeout_s) > 30, "torchrun's default is 30"
    assert container["resources"]["limits"]["rdma/ib"] == 1, "NCCL uses TCP without RDMA"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"], "RDMA pins memory"
    assert container["image"] in (RECIPES / "Dockerfile").read_text(encoding="utf-8")
    if name == "jobset.yaml":
        (replicated,) = whole["spec"]["replicatedJobs"]
        job, limits = replicated["template"]["spec"], container["resources"]["limits"]
        assert (job["completionMode"], job["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
        assert int(parsed.nnodes) == job["parallelism"] == job["completions"]
        assert int(parsed.nproc_per_node) == limits["nvidia.com/gpu"]
        assert whole["spec"]["failurePolicy"]["maxRestarts"] > 0, "all pods restart together"
        host = f"{replicated['name']}-0-0.{whole['metadata']['name']}"
    else:
        trainer, host = whole["spec"]["trainer"], f"node-0-0.{whole['metadata']['name']}"
        assert whole["spec"]["runtimeRef"]["name"] == "torch-distributed"
        assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert parsed.rdzv_endpoint.split(":")[0] == f"{whole['metadata']['name']}-{host}"


def test_restarted_workers_get_a_store_of_their_own() -> None:
    # Otherwise they find addresses of the attempt before in it, and two nodes that were refused hang instead of ending.
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    for kubernetes in ("jobset.yaml", "trainjob.yaml"):
        assert {"name": name, "value": "1"} in pod_of(kubernetes)[1]["env"]
    assert recipe("skypilot.yaml")["envs"][name] == "1"
    assert recipe("skypilot.yaml")["resources"]["network_tier"] == "best", "NCCL uses TCP without RDMA"
    assert f"export {name}=1" in (RECIPES / "slurm.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("jobset.yaml", "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet"),
        ("trainjob.yaml", "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob"),
    ],
)
def test_kubeflow_knows_every_field(name: str, model: str) -> None:
    module, kind = model.split(".")
    reason = "its models are not installed: pip install kubeflow-trainer-api"
    models = pytest.importorskip(f"kubeflow_trainer_api.models.{module}", reason=reason)
    given = recipe(name)
    # Fields that a model does not know are dropped.
    assert getattr(models, kind).from_dict(given).to_dict() == given


# ------------------------------------------------------------------ Ray Train


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_ray_restarts_workers_after_a_kill_and_the_run_resumes(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='Ray is not installed: pip install "ray[train]"')
    out = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "cache"), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(RECIPES / "ray_train.py"), "tasks.yaml", str(out), "--num-workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(command, cwd=folder, env=environment, **pipes)  # type: ignore[call-overload]
    try:
        wait_until(lambda: saved_step(out) >= 2 * SAVE_STEPS, job)
        started = psutil.Process(job.pid).children(recursive=True)
        random.Random(1).choice([one for one in started if "RayTrainWorker" in " ".join(one.cmdline())]).kill()
        printed = job.communicate(timeout=300)[0]
    finally:
        left = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for one in left:
            one.kill()
        job.kill()
    assert job.returncode == 0, printed[-6000:]
    assert saved_step(out) == NUM_STEPS
