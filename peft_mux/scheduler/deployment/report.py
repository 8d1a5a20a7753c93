"""What `peft-mux plan --deployment` shows: a deployment plan, what it was made from, and what else there would be.

It plans, measures and draws nothing: the values come from `peft_mux/planning/deployment.py`, and `plot.py` draws them.
"""

# MERGED: Draws a deployment as L Figure 9: seconds of each kind of replica, and lengths of what lies on it.

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.scheduler.deployment.baselines import Baseline
from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.dispatching.dispatch import Dispatch
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.units import bytes_text

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One configuration that could be deployed.

    Attributes:
        config: how a replica is spread over devices.
        memory_tokens: most tokens of a micro-batch that memory holds; `None` for no limit.
        max_tokens: most tokens that a micro-batch of this run has.
        tokens_per_gpu_s: throughput at each length of the report, over full micro-batches (L Table 3); 0 for lengths
            that do not fit.
        is_proposed: whether it was combined into deployments.
    """

    config: ParallelConfig
    memory_tokens: int | None
    max_tokens: int
    tokens_per_gpu_s: tuple[float, ...]
    is_proposed: bool


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the same tasks on the same devices.

    Attributes:
        name: what the paper calls this way.
        layouts: the replicas in the paper's notation; one entry for each task where each has its own.
        step_s: predicted seconds of one step of every task; `None` where there is no such way.
        gpu_seconds: device seconds of one step of every task, idle devices included; `None` where there is no such
            way.
        note: why there is no such way; empty otherwise.
    """

    name: str
    layouts: tuple[str, ...]
    step_s: float | None
    gpu_seconds: float | None
    note: str = ""

    @classmethod
    def from_baseline(cls, baseline: Baseline, num_gpus: int) -> Alternative:
        """Return what a baseline of the planner comes to on `num_gpus` devices."""
        layouts = tuple(", ".join(map(str, groups)) for groups in baseline.deployments)
        return cls(baseline.name, layouts, baseline.gpu_seconds / num_gpus, baseline.gpu_seconds)


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """What MuxTune's plan runs on replicas that are dispatched alike.

    Attributes:
        config: how each replica is spread over devices.
        num_replicas: replicas that are dispatched so.
        num_sequences: sequences of a step on each.
        htasks: the tasks of each hTask.
        micro_batches: passes of each hTask in a step.
        num_buckets: buckets into which hTasks are grouped.
        step_s: predicted seconds of a step.
    """

    config: ParallelConfig
    num_replicas: int
    num_sequences: int
    htasks: tuple[tuple[str, ...], ...]
    micro_batches: tuple[int, ...]
    num_buckets: int
    step_s: float


@dataclass(frozen=True, slots=True)
class PlannedReplicas:
    """The deployment as MuxTune's plans price it, beside the one that a single curve chooses.

    Attributes:
        rows: what runs on the replicas.
        step_s: predicted seconds of a step: those of the slowest replica under its plan.
        single_layout: the replicas that the curve of a layer alone would choose.
        single_step_s: predicted seconds of a step on these, by the same plans.
        fit_error: mean relative error of the linear forms that the search used over the plans.
        num_priced: deployments that were priced by whole plans.
        num_plans: plans of single replicas that were made.
        num_unplanned: configurations that there was no time to plan.
        planning_s: seconds that it took.
    """

    rows: tuple[ReplicaRow, ...]
    step_s: float
    single_layout: str
    single_step_s: float
    fit_error: float
    num_priced: int
    num_plans: int
    num_unplanned: int
    planning_s: float

    def lines(self) -> list[str]:
        """Return a table of what runs on the replicas."""
        spent = f"; no time to plan {self.num_unplanned} configurations" if self.num_unplanned else ""
        lines = [
            f"replicas by MuxTune's plans: {self.step_s:.4f} s a step; what one curve would deploy, "
            f"{self.single_layout}: {self.single_step_s:.4f} s",
            f"  {self.num_priced} deployments priced by {self.num_plans} plans in {self.planning_s:.1f} s, searched by "
            f"forms fitted to them with a mean error of {self.fit_error:.1%}{spent}",
            f"  {'replicas':<14} {'sequences':>9} {'seconds':>8} {'buckets':>7}  hTasks, each with its passes",
        ]
        for row in self.rows:
            parts = (f"{'+'.join(names)} x{count}" for names, count in zip(row.htasks, row.micro_batches, strict=True))
            lines.append(
                f"  {f'{row.config}x{row.num_replicas}':<14} {row.num_sequences:>9} {row.step_s:>8.4f} "
                f"{row.num_buckets:>7}  {', '.join(parts) or '-'}"
            )
        return lines


@dataclass(frozen=True, slots=True)
class DeploymentReport:
    """A deployment for a run's own tasks, and what stands beside it.

    Attributes:
        plan: the deployment that was chosen.
        devices: number and name of the devices, in words.
        times_from: where the times come from, in words.
        fit_error: mean relative error of the fitted curves over the times that they were made from.
        limit_bytes: memory of one device that may be filled; `None` for no limit.
        lengths: sequence lengths at which throughputs are compared, in tokens.
        configs: the configurations that can be deployed, by devices.
        by_length: the expected batch on the chosen deployment under length-based dispatch.
        alternatives: what the baselines of the paper would take.
        notes: sentences on what the report leaves out.
        planned: what MuxTune's plans run on the replicas, by which they were chosen; `None` where the curve alone was
            asked, as with measured layer times. Where it is given, the chosen deployment and Task-Fused have the
            seconds of whole plans among the alternatives, the others those of the fitted forms.
    """

    plan: DeploymentPlan
    devices: str
    times_from: str
    fit_error: float
    limit_bytes: int | None
    lengths: tuple[int, ...]
    configs: tuple[ConfigRow, ...]
    by_length: Dispatch
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()
    planned: PlannedReplicas | None = None

    @property
    def replicas(self) -> str:
        """Return the deployment in LobRA's notation, as the argument `replicas` takes it."""
        return self.plan.layout

    @property
    def replica_utilisation(self) -> tuple[tuple[ReplicaGroup, float], ...]:
        """Return each group with the share of the step that its slowest replica is busy, 0 to 1."""
        return tuple(zip(self.plan.groups, self.plan.utilisation, strict=True))

    def summary(self) -> str:
        """Return configurations, the plan and its alternatives as tables."""
        limit = "no memory limit" if self.limit_bytes is None else f"{bytes_text(self.limit_bytes)} each"
        return "\n".join(
            [
                f"devices  {self.devices}, {limit}",
                f"times    {self.times_from}; fitted by L Eq. 10 with a mean error of {self.fit_error:.1%}",
                "",
                *self._config_lines(),
                "",
                self.plan.summary(),
                "",
                *([] if self.planned is None else [*self.planned.lines(), ""]),
                *self._alternative_lines(),
                *(f"note: {note}" for note in self.notes),
                f'to run it: replicas: "{self.replicas}", on {sum(group.num_gpus for group in self.plan.groups)} '
                "processes",
            ]
        )

    def picture(self) -> str:
        """Return bars as in L Figure 9."""
        return self.plan.picture()

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def to_json(self) -> str:
        """Return the report as JSON; `replicas` is what the argument of that name takes."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "replicas": self.replicas,
                "devices": self.devices,
                "times_from": self.times_from,
                "fit_error": self.fit_error,
                "limit_bytes": self.limit_bytes,
                "expected_step_s": self.plan.expected_step_s,
                "gpu_seconds": self.plan.gpu_seconds,
                "utilisation": {str(group): share for group, share in self.replica_utilisation},
                "lengths": self.lengths,
                "configurations": [asdict(row) for row in self.configs],
                "alternatives": [asdict(one) for one in self.alternatives],
                "by_length": json.loads(self.by_length.to_json()),
                "plan": json.loads(self.plan.to_json()),
                "notes": self.notes,
                "planned": None if self.planned is None else asdict(self.planned),
            }
        )

    def _config_lines(self) -> list[str]:
        """Return L Table 3 of this run."""
        heads = "".join(f"{f'at {length}':>9}" for length in self.lengths)
        lines = [
            f"  {'configuration':<14} {'GPUs':>4} {'memory holds':>12} {'max tokens':>10}{heads}  tokens/s and GPU"
        ]
        for row in self.configs:
            holds = "no limit" if row.memory_tokens is None else str(row.memory_tokens)
            rates = "".join(f"{rate:>9.0f}" if rate else f"{'-':>9}" for rate in row.tokens_per_gpu_s)
            proposed = "  combined" if row.is_proposed else ""
            lines.append(
                f"  {row.config!s:<14} {row.config.num_gpus:>4} {holds:>12} {row.max_tokens:>10}{rates}{proposed}"
            )
        return lines

    def _alternative_lines(self) -> list[str]:
        """Return a table of the chosen deployment and its alternatives."""
        plan = self.plan
        step_s = plan.expected_step_s if self.planned is None else self.planned.step_s
        chosen_gpu_s = step_s * plan.num_gpus
        rows = [Alternative("LobRA (chosen)", (plan.layout,), step_s, chosen_gpu_s)]
        rows += self.alternatives
        width = max(len(row.name) for row in rows)
        lines = [f"  {'way':<{width}} {'step s':>9} {'GPU s':>9} {'to LobRA':>8}  replicas"]
        for row in rows:
            if row.gpu_seconds is None or row.step_s is None:
                lines.append(f"  {row.name:<{width}} {'-':>9} {'-':>9} {'-':>8}  {row.note}")
                continue
            ratio = row.gpu_seconds / chosen_gpu_s if chosen_gpu_s else 1.0
            lines.append(
                f"  {row.name:<{width}} {row.step_s:>9.4f} {row.gpu_seconds:>9.3f} {ratio:>7.2f}x"
                f"  {'; '.join(dict.fromkeys(row.layouts))}"
            )
        return lines


_FORMATS = (".png", ".svg")


def save_deployment(report: DeploymentReport, path: str | Path) -> Path:
    """Draw length-based dispatch beside the balanced one into a .png or .svg file, and return the path.

    Args:
        report: the planned deployment, with its expected batch under both dispatches.
        path: where the picture is written; an existing file is replaced.

    Raises:
        ConfigError: for another kind of file, or if matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ConfigError(f"image: got {path.name!r}; allowed: a name that ends in {' or '.join(_FORMATS)}.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("image: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    ways = {"length-based dispatch": report.by_length, "balanced dispatch": report.plan.expected}
    figure = Figure(figsize=(5.2 * len(ways), 6.2), layout="constrained")
    axes = figure.subplots(2, len(ways), squeeze=False, sharey="row")
    names = [str(group) for group in report.plan.groups]
    for column, (title, dispatch) in enumerate(ways.items()):
        _draw_seconds(axes[0][column], names, dispatch)
        axes[0][column].set_title(f"{title}: {dispatch.makespan_s:.3g} s a step")
        _draw_lengths(axes[1][column], names, dispatch)
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("tokens a step, padded")
    axes[1][-1].legend(title="padded to", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # A fixed salt and no date: the same plan draws the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def _draw_seconds(axes: Any, names: list[str], dispatch: Dispatch) -> None:
    """Draw a bar for the seconds of each group of replicas."""
    bars = axes.bar(names, dispatch.group_s, color="C0")
    axes.bar_label(bars, [f"{seconds:.3g}" for seconds in dispatch.group_s])
    axes.margins(y=0.12)


def _draw_lengths(axes: Any, names: list[str], dispatch: Dispatch) -> None:
    """Draw the padded tokens of each group as a stack of its buckets."""
    from matplotlib import colormaps

    palette = colormaps["viridis"]
    bottom = [0.0] * len(names)
    for bucket, boundary in enumerate(dispatch.boundaries):
        tokens = [group[bucket] * boundary for group in dispatch.counts]
        color = palette(bucket / max(1, len(dispatch.boundaries) - 1))
        axes.bar(names, tokens, bottom=bottom, color=color, label=str(boundary))
        bottom = [below + own for below, own in zip(bottom, tokens, strict=True)]
