"""The parts of MuxTune's evaluation: end to end, breakdown, alignment, memory (M §5.2, §5.3, Fig. 13 to 17, 20)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.papers.runs import Contender, Measured, measure, spread
from benchmarks.papers.table import Row, Settings
from benchmarks.training.audit import audit

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
}
PAPER_ENDS = {
    "uniform": {"hf": "up to 2.33x", "NeMo-like": "up to 1.87x", "padded": "up to 1.64x"},
    "nonuniform": {"hf": "2.23x", "NeMo-like": "1.83x", "padded": "1.85x"},
}
"""M §5.2, Figure 14, on A40 GPUs."""
CHUNKS = (32, 64, 128)


def end_to_end(settings: Settings, backbone: Path) -> list[Row]:
    """Figure 14: the planner's own plan on two processes against each baseline, both mixes."""
    rows = []
    for layout, arguments in LAYOUTS.items():
        contenders = [
            Contender("mux", 2, arguments),
            Contender("hf", 2, is_hf=True),
            # One task after another, each through 1F1B that is drained at the end of every step.
            Contender("NeMo-like", 2, {**arguments, "planner": "sequential", **_plain(layout)}),
            Contender("padded", 2, {**arguments, "planner": "together", **_plain(layout)}, padded=True),
        ]
        for mix in ("uniform", "nonuniform"):
            times = measure(contenders, settings.case(mix), settings.rounds, backbone)
            rows += [
                Row("a", f"M Fig. 14, {layout}, {mix}: against {name}", paper, _times(times, name), "x", spread(times))
                for name, paper in PAPER_ENDS[mix].items()
            ]
    return rows


def breakdown(settings: Settings, backbone: Path) -> list[Row]:
    """Figure 16: one technique off at a time, on a pipeline of two stages, light and heavy."""
    pp2 = LAYOUTS["pp2"]
    contenders = [
        Contender("mux", 2, pp2),
        Contender("without task fusion", 2, {**pp2, "planner": "interleaved"}),
        Contender("without operator orchestration", 2, {**pp2, "pipeline_schedule": "1f1b"}),
        Contender("without data alignment", 2, pp2, padded=True),
        Contender("with a flush at every step", 2, {**pp2, "pipeline_flush": "every_step"}),
    ]
    published = {
        "light": ("-36.1%", "-30.3%", "-22.5%", "-"),
        "heavy": ("-6.25%", "-25.1%", "-34.3%", "-"),
    }
    rows = []
    for load, batch_size in (("light", 2), ("heavy", settings.heavy_rows)):
        times = measure(contenders, settings.case("nonuniform", batch_size=batch_size), settings.rounds, backbone)
        for contender, paper in zip(contenders[1:], published[load], strict=True):
            lost = 100 * (times["mux"].median_s / times[contender.name].median_s - 1)
            rows.append(Row("b", f"M Fig. 16, pp2, {load}: {contender.name}", paper, lost, "%", spread(times)))
    return rows


def alignment(settings: Settings, backbone: Path) -> list[Row]:
    """Figures 20 and 13: effective tokens/s of zero padding, of packing alone, and of chunks of several sizes."""
    pp2 = {**LAYOUTS["pp2"], "planner": "together"}
    contenders = [
        Contender("zero padding", 2, pp2, padded=True),
        Contender("packing only", 2, pp2),
        *(Contender(f"chunks of {size}", 2, {**pp2, "chunk_size": size, "pad_to_chunks": True}) for size in CHUNKS),
    ]
    case = settings.case("nonuniform")
    times = measure(contenders, case, settings.rounds, backbone)
    tokens = case.workload().num_timed_tokens
    rows = []
    for contender in contenders:
        rate = tokens / times[contender.name].median_s
        gain = times["zero padding"].median_s / times[contender.name].median_s
        of_chunks = "up to 2.57x (chunks of 128), 3.59x (of 64)" if "chunks" in contender.name else "-"
        paper = "1x" if contender.padded else of_chunks
        what = f"M Fig. 20, pp2, one hTask: effective, {contender.name} over zero padding ({rate:,.0f} tokens/s)"
        rows.append(Row("c", what, paper, gain, "x", spread(times)))
    return rows


def memory(settings: Settings, backbone: Path) -> list[Row]:
    """Figure 17: peak memory of more and more tasks against a backbone for each task, and a padded joint batch."""
    rows = []
    for number in settings.task_numbers:
        case = settings.case("nonuniform", num_tasks=number)
        audits = {name: audit(name, case, 1) for name in ("mux", "hf", "padded")}
        for what, taken, paper in (
            ("a backbone for each task (computed)", audits["hf"].replicated_bytes, "up to 5.29x"),
            ("padded joint batch", audits["padded"].peak_bytes, "up to 1.46x"),
        ):
            ratio = taken / audits["mux"].peak_bytes
            peak = f"mux takes {audits['mux'].peak_bytes / 2**20:,.0f} MiB"
            rows.append(Row("d", f"M Fig. 17, {number} tasks: memory of {what}", paper, ratio, "x", peak))
    return rows


def _plain(layout: str) -> dict[str, Any]:
    """Return what turns a layout's own orchestration off."""
    return {"pipeline_schedule": "1f1b"} if layout == "pp2" else {"interleaved_passes": 1}


def _times(times: dict[str, Measured], name: str) -> float:
    return times[name].median_s / times["mux"].median_s
