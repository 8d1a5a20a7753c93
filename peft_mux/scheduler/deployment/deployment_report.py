"""The output of `peft-mux plan --deployment`: a deployment plan, its inputs, and the alternatives.

The values come from `peft_mux/planning/deployment.py`; this file prints, serialises and draws them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from peft_mux.scheduler.deployment.baselines import Baseline
from peft_mux.scheduler.deployment.composed import ComposedDeployment
from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan, FailureOverhead
from peft_mux.scheduler.dispatching.dispatch import Dispatch
from peft_mux.scheduler.drawing import new_figure, save_figure
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import layout_text
from peft_mux.scheduler.units import aligned, bytes_text, rate_text

FORMAT_VERSION, _PLAN_VERSION = 2, 3


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
class DeploymentReport:
    """A deployment for a run's own tasks, and the alternatives.

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
        composed: what MuxTune's plans run on the replicas, by which they were chosen; `None` if the curve alone was
            asked, as with measured layer times. If it is given, the chosen deployment and Task-Fused have the seconds
            of whole plans among the alternatives, the others those of the corrected curve.
        failures: what failures and checkpoints cost; `None` if no rate of failures was given.
    """

    plan: DeploymentPlan
    devices: str
    times_from: str
    fit_error: float
    limit_bytes: int | None
    lengths: tuple[int, ...]
    configs: tuple[ConfigRow, ...]
    by_length: Dispatch
    alternatives: tuple[Baseline, ...]
    notes: tuple[str, ...] = ()
    composed: ComposedDeployment | None = None
    failures: FailureOverhead | None = None

    @property
    def replicas(self) -> str:
        """Return the deployment in LobRA's notation, as the argument `replicas` takes it."""
        return self.plan.layout

    def __str__(self) -> str:
        """Return configurations, the plan and its alternatives as tables."""
        limit = "no memory limit" if self.limit_bytes is None else f"{bytes_text(self.limit_bytes)} each"
        lines = [
            f"devices  {self.devices}, {limit}",
            f"times    {self.times_from}; fitted by L Eq. 10 with a mean error of {self.fit_error:.1%}",
            "",
            "configurations  most tokens of a micro-batch; tokens/s per GPU by length of rows",
        ]
        rows = [["layout", "GPUs", "memory holds", "max tokens", *(f"at {length}" for length in self.lengths), ""]]
        for row in self.configs:
            holds = "no limit" if row.memory_tokens is None else str(row.memory_tokens)
            rates = [rate_text(rate or None) for rate in row.tokens_per_gpu_s]
            proposed = "combined" if row.is_proposed else ""
            rows.append([str(row.config), str(row.config.num_gpus), holds, str(row.max_tokens), *rates, proposed])
        lines += aligned(rows, indent="  ")
        lines += ["", self.plan.summary(), ""]
        plan, composed = self.plan, self.composed
        if composed is not None:
            lines += [
                f"replicas by MuxTune's plans: {composed.chosen.step_s:.4f} s a step; what one curve would deploy, "
                f"{layout_text(composed.single.groups)}: {composed.single.step_s:.4f} s",
                f"  {composed.num_priced} deployments priced by {composed.num_plans} plans in "
                f"{composed.planning_s:.1f} s, searched by curves corrected by them, with a mean error of "
                f"{composed.fit_error:.1%}",
            ]
            rows = [["replicas", "sequences", "seconds", "buckets", "hTasks, each with its passes"]]
            for replica in composed.chosen.replicas:
                htasks = zip(replica.htasks, replica.micro_batches, strict=True)
                parts = ", ".join(f"{' + '.join(names)} x{passes}" for names, passes in htasks)
                numbers = str(replica.num_sequences), f"{replica.step_s:.4f}", str(replica.num_buckets)
                rows.append([f"{replica.config}x{replica.num_replicas}", *numbers, parts or "-"])
            lines += aligned(rows, (0, 4), "  ")
            lines.append("")
        step_s = plan.expected_step_s if composed is None else composed.chosen.step_s
        chosen = Baseline.of("LobRA (chosen)", [(plan.groups, step_s)], plan.num_gpus)
        ways = [chosen, *self.alternatives]
        rows = [["way", "step s", "GPU s", "to LobRA", "replicas"]]
        for way in ways:
            numbers, layouts = ["-"] * 3, way.note
            if way.deployments:
                ratio = way.gpu_seconds / chosen.gpu_seconds if chosen.gpu_seconds else 1.0
                numbers = [f"{sum(way.step_s):.4f}", f"{way.gpu_seconds:.3f}", f"{ratio:.2f}x"]
                layouts = "; ".join(dict.fromkeys(map(layout_text, way.deployments)))
            rows.append([way.name, *numbers, layouts])
        lines += aligned(rows, (0, 4), "  ")
        if (lost := self.failures) is not None:
            share, save_steps = lost.lost_share, max(1, round(lost.save_every_s / step_s))
            lines += [
                f"failures: {lost.failures_per_day:g} a day, checkpoints of {lost.checkpoint_s:.3g} s, restarts of "
                f"{lost.restart_s:.3g} s: with a checkpoint every {lost.save_every_s:.0f} s (save_steps={save_steps}), "
                f"{share:.1%} of the time is lost, {24 * share:.2g} hours a day",
            ]
        lines += [f"note: {note}" for note in self.notes]
        num_processes = sum(group.num_gpus for group in plan.groups)
        return "\n".join([*lines, f'to run it: replicas: "{self.replicas}", on {num_processes} processes'])

    summary = __str__

    def picture(self) -> str:
        """Return bars as in L Figure 9."""
        return self.plan.picture()

    def to_json(self) -> str:
        """Return the report as JSON; `replicas` is the value for the argument of that name."""
        plan, composed = self.plan, self.composed
        kept = "devices times_from fit_error limit_bytes lengths notes".split()
        counts = "fit_error num_priced num_plans num_unplanned planning_s".split()
        planned = composed and {
            "rows": [asdict(replica) for replica in composed.chosen.replicas],
            "step_s": composed.chosen.step_s,
            "single_layout": layout_text(composed.single.groups),
            "single_step_s": composed.single.step_s,
            **{name: getattr(composed, name) for name in counts},
        }
        alternatives = [
            {
                "name": baseline.name,
                "layouts": list(map(layout_text, baseline.deployments)),
                "step_s": sum(baseline.step_s) if baseline.deployments else None,
                "gpu_seconds": baseline.gpu_seconds if baseline.deployments else None,
                "note": baseline.note,
            }
            for baseline in self.alternatives
        ]
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "replicas": self.replicas,
                **{name: getattr(self, name) for name in kept},
                "failures": self.failures and asdict(self.failures),
                "expected_step_s": plan.expected_step_s,
                "exchange_s": plan.exchange_s,
                "gpu_seconds": plan.gpu_seconds,
                "utilisation": dict(zip(map(str, plan.groups), plan.utilisation, strict=True)),
                "configurations": [asdict(row) for row in self.configs],
                "alternatives": alternatives,
                "by_length": asdict(self.by_length),
                "plan": {"format_version": _PLAN_VERSION, **asdict(plan)},
                "planned": planned,
            }
        )


def save_deployment(report: DeploymentReport, path: str | Path) -> Path:
    """Draw length-based and balanced dispatch side by side, as in L Figure 9, and return the path.

    Args:
        report: the planned deployment, with its expected batch under both dispatches.
        path: a .png or .svg file; an existing file is replaced.

    Raises:
        ConfigError: for another kind of file, or if matplotlib is not installed.
    """
    ways = {"length-based dispatch": report.by_length, "balanced dispatch": report.plan.expected}
    figure = new_figure(figsize=(5.2 * len(ways), 6.2), layout="constrained")
    axes = figure.subplots(2, len(ways), squeeze=False, sharey="row")
    names = [str(group) for group in report.plan.groups]
    from matplotlib import colormaps  # an extra, which `new_figure` has found

    palette = colormaps["viridis"]  # shades in the order of lengths
    for column, (title, dispatch) in enumerate(ways.items()):
        seconds_axes, tokens_axes = axes[0][column], axes[1][column]
        seconds_axes.set_title(f"{title}: {dispatch.makespan_s:.3g} s a step")
        bars = seconds_axes.bar(names, dispatch.group_s, color="C0")
        seconds_axes.bar_label(bars, [f"{seconds:.3g}" for seconds in dispatch.group_s])
        seconds_axes.margins(y=0.12)
        # The padded tokens of each group, as a stack of its buckets.
        bottom = [0.0] * len(names)
        for bucket, boundary in enumerate(dispatch.boundaries):
            tokens = [group[bucket] * boundary for group in dispatch.counts]
            color = palette(bucket / max(1, len(dispatch.boundaries) - 1))
            tokens_axes.bar(names, tokens, bottom=bottom, color=color, label=str(boundary))
            bottom = [below + height for below, height in zip(bottom, tokens, strict=True)]
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("tokens a step, padded")
    axes[1][-1].legend(title="padded to", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, Path(path))
