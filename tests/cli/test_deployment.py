"""`peft-mux plan --deployment`: what it prints, draws and refuses, on tasks of very unlike lengths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig

from peft_mux.cli.config_file import read_cluster, read_config
from peft_mux.errors import ConfigError
from peft_mux.parallel.layout import parse_layout
from peft_mux.planning.deployment import notes_on, redeploy, times_from
from peft_mux.planning.replica_facts import run_facts, run_time_model
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.deployment.space import candidate_configs
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.plan import Link
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.cli.lab import save_backbone, write_rows
from tests.shell import Shell

TASKS = """\
model: backbone
output_dir: {output_dir}
run: {{use_cpu: true, report_to: none, max_steps: 30, max_length: 512, max_tokens_per_micro_batch: 512}}
defaults: {{dataset: short.jsonl, peft: {{r: 4, target_modules: all-linear}}}}
tasks:
  chat: {{train_batch_size: 24}}
  books: {{dataset: long.jsonl, train_batch_size: 1}}
"""
GIB = 2**30
DEVICES = ["--devices", "4xA100-40GB"]
ONE, TWO = ParallelConfig(1, 1), ParallelConfig(2, 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tiny backbone, its tokenizer, short rows and long rows."""
    folder = tmp_path_factory.mktemp("deployment")
    save_backbone(folder / "backbone", ["one", "two", "three", "four"])
    for name, lengths in (("short", [12, 20, 31, 9] * 8), ("long", [256, 240, 250, 230])):
        rows = [{"input_ids": [5 + place % 3 for place in range(length)]} for length in lengths]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    """Return a file of two tasks."""
    path = made / f"{tmp_path.name}.yaml"
    path.write_text(TASKS.format(output_dir=tmp_path / "out"), encoding="utf-8")
    return path


def trainer_of(file: Path, *overrides: str) -> MultiTaskTrainer:
    from transformers import AutoTokenizer

    config = read_config(file, list(overrides))
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent / "backbone"))
    return MultiTaskTrainer(config.model, config.args, config.tasks, processing_class=tokenizer)


def facts_of(trainer: MultiTaskTrainer, devices: str | None = None) -> Any:
    cluster = None if devices is None else parse_devices(devices)
    return run_facts(trainer._plans.planner, trainer.table.plannable, cluster)


def tight(file: Path, devices: str | None = None) -> str:
    """Return a memory limit under which one device holds the short sequences only."""
    facts = facts_of(trainer_of(file), devices)
    return f"run.memory_limit_gib={facts.memory.peak_bytes(facts.loads, 200) / GIB!r}"


# ------------------------------------------------------------------------- plans


def test_a_deployment_of_other_devices_is_shown_with_its_sources_and_alternatives(
    file: Path, tmp_path: Path, shell: Shell
) -> None:
    said = shell("plan", file, "--deployment", *DEVICES, "--failures-per-day", "4")
    assert "devices  4 x A100-40GB, 37.25 GiB each" in said
    assert "failures: 4 a day, checkpoints of " in said
    assert "% of the time is lost" in said
    assert "times    from data sheets, as no profile was measured" in said
    for part in ("deployment  <", "max tokens", "Task-Fused", "Task-Sequential", "LobRA-Sequential", "seconds a step"):
        assert part in said
    assert "length-based dispatch" in said
    assert "replicas by MuxTune's plans: " in said
    assert "hTasks, each with its passes" in said
    replicas = said.split("hTasks, each with its passes\n")[1].split("\n\n")[0].splitlines()
    row = r"  <\d,\d>x\d +\d+ +\d\.\d{4} +\d+  (-|[a-z+ ]+ x\d+(, [a-z+ ]+ x\d+)*)"
    assert replicas
    assert all(re.fullmatch(row, line) for line in replicas), replicas
    assert "generator" not in said
    assert not (tmp_path / "out").exists(), "a plan writes nothing"


def test_tight_memory_leads_to_unlike_replicas_that_can_be_run_as_they_are_printed(file: Path, shell: Shell) -> None:
    limit = tight(file, DEVICES[1])
    data = shell.json("plan", file, "--deployment", *DEVICES, "--set", limit)
    layout = parse_layout(data["replicas"])
    assert layout.world_size <= 4
    rows = {(row["config"]["tp"], row["config"]["pp"]): row for row in data["configurations"]}
    assert rows[1, 1]["max_tokens"] == rows[1, 1]["memory_tokens"] == 200
    longest = max(data["plan"]["bucketing"]["boundaries"])
    assert 256 <= longest <= max(rows[config.tp, config.pp]["max_tokens"] for config in layout.replicas)
    assert data["plan"]["global_batch"] == 25
    ways = data["planned"]
    assert 0 < ways["step_s"] <= ways["single_step_s"]
    assert sum(row["num_replicas"] * row["num_sequences"] for row in ways["rows"]) == sum(
        data["plan"]["bucketing"]["counts"]
    )
    assert data["limit_bytes"] == int(float(limit.split("=")[1]) * GIB)


@pytest.mark.slow
def test_json_and_image_are_those_of_the_report_from_python(file: Path, tmp_path: Path, shell: Shell) -> None:
    image = tmp_path / "plan.svg"
    data = shell.json(
        "plan", file, "--deployment", *DEVICES, "--failures-per-day", "4", "--restart-s", "360", "--image", image
    )
    assert data["devices"] == "4 x A100-40GB"
    assert 360 * 4 / 86_400 < data["failures"]["lost_share"] < 0.02
    assert "balanced dispatch" in image.read_text(encoding="utf-8")
    report = trainer_of(file).plan_deployment("4xA100-40GB")
    assert (data["replicas"], report.plan.num_gpus) == (report.replicas, 4)
    assert "failures:" not in str(report)


def test_divided_optimizer_states_count_and_leave_whole_models_alone(file: Path) -> None:
    facts, divided = (facts_of(trainer_of(file, *more), "4xA100-40GB") for more in ((), ("run.shard_optimizer=true",)))
    parameters = [load.trainable_parameters for load in facts.loads]
    # AdamW's two moments in fp32: a quarter of them, or those of the largest task.
    freed_bytes = 8 * sum(parameters) - 8 * max(sum(parameters) / 4, max(parameters))
    held = [one.memory_of(ONE).estimate_stage(one.loads, 0).adapter_bytes for one in (facts, divided)]
    assert held[0] - held[1] == freed_bytes > 0
    assert TWO in candidate_configs(facts, 4)
    assert candidate_configs(divided, 4) == (ONE,), "the engine refuses shard_optimizer where a model is divided"


def test_without_devices_the_run_s_own_are_planned_for(file: Path, shell: Shell) -> None:
    said = shell("plan", file, "--deployment")
    assert "devices  1 x cpu, no memory limit" in said
    assert 'to run it: replicas: "<1,1>x1", on 1 processes' in said
    assert "note: memory is not limited here" in said


def test_measured_times_of_a_layer_take_the_place_of_data_sheets(file: Path, tmp_path: Path, shell: Shell) -> None:
    times, limits = tmp_path / "times.csv", tmp_path / "limits.csv"
    rows = [(tp, s, b, (b * s / tp**0.3 + 3) / 100) for tp in (1, 2) for s in (64, 256, 512, 1024) for b in (1, 2, 4)]
    times.write_text("tp,seq_len,mbs,time\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    limits.write_text("tp,pp,max_tokens\n1,1,128\n2,1,512\n")
    options = ["--deployment", *DEVICES, "--layer-profile", times, "--max-tokens", limits]
    said = shell("plan", file, *options)
    assert "times    layer times measured, from times.csv" in said
    assert said.split("deployment  ")[1].splitlines()[0] == "<2,1>x1, <1,1>x2"
    assert "by MuxTune's plans" not in said, "layer times say nothing of what else a plan is made of"
    times.write_text("tp,seq_len\n1,64\n")
    assert "layer profile times.csv, limits.csv" in shell.refused("plan", file, *options)


# -------------------------------------------------------------------------- faults


def test_unknown_devices_are_refused_by_name(file: Path, shell: Shell) -> None:
    assert "whose device 'B7' is not known" in shell.refused("plan", file, "--deployment", "--devices", "4xB7")


def test_sequences_that_no_replica_holds_are_refused_by_task(file: Path, shell: Shell) -> None:
    limit = tight(file, DEVICES[1])
    error = shell.refused("plan", file, "--deployment", "--devices", "1xA100-40GB", "--set", limit)
    assert 'task "books" has sequences of' in error
    assert '"chat"' not in error
    assert "error: plan --deployment: rows must have at most 200 tokens, the most that a replica on 1" in error
    assert "Set max_length=200" in error


def test_a_backbone_that_fits_nowhere_is_refused_with_what_it_takes(file: Path, shell: Shell) -> None:
    error = shell.refused("plan", file, "--deployment", *DEVICES, "--set", "run.memory_limit_gib=0.00001")
    assert (
        'error: replicas: the backbone and the adapters of "chat", "books" take 185.14 KiB on a device of <4,1>, '
        "the most"
    ) in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--deployment", "--gantt"], "--gantt cannot be combined with --deployment"),
        (["--deployment", "--explain", "chat"], "--explain cannot be combined with --deployment"),
        (["--deployment", "--max-tokens", "x.csv"], "--max-tokens needs --layer-profile"),
        (["--layer-profile", "x.csv"], "--layer-profile needs --deployment"),
        (["--free-exchange"], "--free-exchange needs --deployment. Add it."),
        (["--failures-per-day", "1"], "--failures-per-day needs --deployment. Add it."),
        (["--deployment", "--failures-per-day", "nan"], "failures_per_day must be more than 0"),
        (
            ["--deployment", "--failures-per-day", "1", "--restart-s", "-2"],
            "restart_s must be more than 0, such as 2.5, got -2",
        ),
        (["--deployment", "--storage-gb-per-s", "5"], "--storage-gb-per-s needs --failures-per-day. Add it."),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], said: str, file: Path, shell: Shell) -> None:
    assert said in shell.refused("plan", file, *options)


# --------------------------------------------------------------------- from Python


def test_the_time_model_of_a_run_knows_its_replicas_and_what_they_hold(file: Path) -> None:
    trainer = trainer_of(file, tight(file))
    layout = parse_layout("<1,1>x2, <2,1>")
    model = run_time_model(trainer._plans.planner, trainer.table.plannable, layout)
    assert set(model.configurations) == {ONE, TWO}
    assert model.max_tokens[ONE] == 200
    assert model.max_tokens[TWO] == facts_of(trainer).memory_tokens(TWO)
    assert model.max_tokens[TWO] > 200


def test_a_stream_may_bring_rows_as_long_as_max_length(file: Path) -> None:
    trainer = trainer_of(file, "run.max_tokens_per_micro_batch=64")
    rows = [{"input_ids": [5, 6, 7]}] * 3
    stream = Dataset.from_list(rows).to_iterable_dataset()
    config = LoraConfig(r=2, target_modules=["q_proj"])
    layout = parse_layout("<1,1>x2, <2,1>")
    runs = [run for run in trainer.table.plannable if run.name == "chat"]
    known = run_time_model(trainer._plans.planner, runs, layout)
    assert known.max_tokens[ONE] == 64
    trainer.register_tasks(
        [Task(name="stream", peft_config=config, train_dataset=stream, train_batch_size=2, max_steps=2)]
    )
    runs = [run for run in trainer.table.plannable if run.name in ("chat", "stream")]
    assert run_time_model(trainer._plans.planner, runs, layout).max_tokens[ONE] == trainer.args.max_length == 512


def test_redeployment_is_needed_where_the_old_replicas_cannot_hold_the_tasks(file: Path) -> None:
    trainer = trainer_of(file, tight(file))
    planner, runs = trainer._plans.planner, trainer.table.plannable
    decision = redeploy(planner, runs, parse_layout("<1,1>x4"), restart_s=1.0)
    assert decision.is_needed
    assert parse_layout(decision.new).world_size <= 4
    stays = redeploy(planner, runs, parse_layout(decision.new), restart_s=1.0)
    assert not stays.is_needed
    with pytest.raises(ConfigError, match="redeploy needs at least one task that is still to be trained, got none"):
        redeploy(planner, [], parse_layout("<1,1>x4"))


@pytest.mark.slow
def test_the_exchange_of_gradients_is_counted_unless_it_is_free_as_in_the_paper(file: Path, shell: Shell) -> None:
    words = ["plan", file, "--deployment", "--devices", "4x1xA100-40GB"]
    counted, free = shell.json(*words), shell.json(*words, "--free-exchange")
    assert free["exchange_s"] == 0
    assert any(note.endswith("between replicas, as in L") for note in free["notes"])
    assert any("s a step in which replicas add their gradients" in note for note in counted["notes"])
    assert counted["exchange_s"] > 0 or counted["plan"]["groups"][0]["count"] == 1
    assert counted["expected_step_s"] == pytest.approx(
        max(counted["plan"]["expected"]["group_s"]) + counted["exchange_s"], rel=1e-9
    )


CLUSTER = """
device: A100-40GB
nodes: 4
devices_per_node: 1
ports_per_node: 1
inter_node_gb_per_s: {gb_per_s}
inter_node_latency_us: 20
"""


@pytest.mark.slow
def test_a_file_describes_nodes_and_their_links(file: Path, tmp_path: Path, shell: Shell) -> None:
    found = {}
    for gb_per_s in (25, 0.25):
        path = tmp_path / f"cluster-{gb_per_s}.yaml"
        path.write_text(CLUSTER.format(gb_per_s=gb_per_s), encoding="utf-8")
        found[gb_per_s] = shell.json("plan", file, "--deployment", "--devices", path)
    assert found[25]["devices"] == "4 x A100-40GB"
    assert found[0.25]["expected_step_s"] > found[25]["expected_step_s"]
    cluster = read_cluster(tmp_path / "cluster-25.yaml")
    assert cluster == replace(parse_devices("4x1xA100-40GB"), inter_node=Link(20 * 1e-6, 25e9), ports_per_node=1)
    path.write_text(path.read_text(encoding="utf-8").replace("nodes: 4", "nodes: 2"), encoding="utf-8")
    assert "2 x A100-40GB" in shell("plan", file, "--devices", path)


def test_all_faults_of_such_a_file_are_named_with_their_lines(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: H100-80\nnodes: 0\ninter_node_gb_per_s: -1\nintra_node_latency_us: .nan\nspeed: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    for said in (
        "cluster.yaml:2 nodes must be an integer of 1 or more, got 0",
        "cluster.yaml devices_per_node must be an integer of 1 or more, got nothing",
        "cluster.yaml:3 inter_node_gb_per_s must be a number above 0, got -1",
        "cluster.yaml:4 intra_node_latency_us must be a number of 0 or more, got nan",
        "cluster.yaml:5 speed must be one of device, ",
    ):
        assert said in str(caught.value)
    path.write_text("device: H100-80\nnodes: 1\ndevices_per_node: 8\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:1 device must be one of .*got 'H100-80'.*Did you mean"):
        read_cluster(path)
    for text in ("- 1", "", "nodes: [", "a: &a [*a]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"cluster\.yaml"):
            read_cluster(path)
    with pytest.raises(ConfigError, match="which does not exist"):
        read_cluster(tmp_path / "none.yaml")


def test_where_no_link_is_known_the_report_says_that_shards_look_too_fast(file: Path) -> None:
    trainer = trainer_of(file)
    plan = trainer.plan_deployment().plan
    facts = facts_of(trainer)
    measured = replace(facts, profile=replace(facts.profile, source="measured", link=None))
    unknown = replace(measured, links=None)
    own = replace(unknown, profile=replace(unknown.profile, link=Link(1e-4, 1e9)))
    cases = (measured, unknown, own)
    said = {times_from(one, None).rpartition("; ")[2]: notes_on(one, plan, None, None) for one in cases}
    assert list(said) == [f"links between devices {words}" for words in ("from data sheets", "not known", "measured")]
    assert [any("no link" in note for note in notes) for notes in said.values()] == [False, True, False]
