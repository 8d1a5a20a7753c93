"""What a run draws: curves of losses, a run as HTML for notebooks, and `report.html`, which needs no network or script.

HTML has inline SVG (`chart_svg` here, `rows_svg` of `peft_mux.scheduler.drawing`), so it works without matplotlib. Text
and lines have the colour of their surroundings, which suits light and dark themes. Matplotlib draws the pictures of
losses (`losses.png` of the run, `loss.png` of a task).
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.theme import Theme

from peft_mux.errors import ConfigError, printable
from peft_mux.log.lines import counted, time_text
from peft_mux.reporting.run_report import RunReport, status_word
from peft_mux.reporting.table import RunTable
from peft_mux.reporting.views import RunView, TaskView, number_text, shortened, table_html
from peft_mux.scheduler.drawing import PALETTE, legend, new_figure, rounded_ticks
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.plan_views import MeasuredStep, memory_html, timeline_html
from peft_mux.scheduler.units import bytes_text
from peft_mux.storage import write_file

# ---------------------------------------------------------------- curves as SVG

_MOST_POINTS = 200
"""Points of a curve that are drawn; the first and the last ones always are."""
_LEFT, _BOTTOM, _TOP, _LINE = 58, 32, 20, 14
"""Pixels; the left is wider for long numbers, the top higher for titles of two lines."""
_LETTER_WIDTH = 6.8
"""Pixels of a letter, rounded up."""
_FEW_POINTS = 3
"""Curves of so few points show them."""


def chart_svg(
    title: str, tasks: Sequence[TaskView], *, below: str = "", what: str = "loss", width: int = 250, height: int = 150
) -> str:
    """Draw curves of losses over the steps of tasks; return "" if there is no point.

    Those of held-out rows are dashed, with dots. Each task has a colour; of a single one, each curve has.

    Args:
        title: the title of the chart.
        tasks: the tasks.
        below: the second line of the title; "" for none.
        what: what the curves are of, in words next to the axis.
        width: pixels of the chart.
        height: pixels of the chart below the second line of its title.
    """
    lines = [
        (f"{task.name}, {split}", points, number + (is_held_out and len(tasks) == 1), is_held_out)
        for number, task in enumerate(tasks)
        for split, points, is_held_out in (("train", task.losses, False), ("eval", task.eval_losses, True))
        if points
    ]
    points = [point for _, line_points, _, _ in lines for point in line_points]
    if not points:
        return ""
    last = max(max(step for step, _ in points), 1)
    low, high = min(value for _, value in points), max(value for _, value in points)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    marks = rounded_ticks(low - pad, high + pad)
    top, height = (_TOP + _LINE, height + _LINE) if below else (_TOP, height)
    left = max([_LEFT, *(round(_LETTER_WIDTH * len(text)) + 22 for _, text in marks)])
    number_width = _LETTER_WIDTH * len(f"{last:,}")
    bottom, right = height - _BOTTOM, width - max(16, round(number_width / 2) + 2)
    scale_x, scale_y = (right - left) / last, (bottom - top) / (high - low + 2 * pad)

    def y_of(value: float) -> str:
        return f"{bottom - (value - low + pad) * scale_y:.1f}"

    drawn = []
    for name, kept, number, is_held_out in lines:
        color = PALETTE[number % len(PALETTE)]
        if len(kept) > _MOST_POINTS:
            stride = -(-len(kept) // _MOST_POINTS)
            kept = (*kept[:-1:stride], kept[-1])
        places = [(f"{left + step * scale_x:.1f}", y_of(value)) for step, value in kept]
        joined = " ".join(f"{x},{y}" for x, y in places)
        dashes = ' stroke-dasharray="5 3"' if is_held_out else ""
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5"{dashes} points="{joined}"/>')
        if is_held_out or len(kept) <= _FEW_POINTS:
            for (x, y), (step, value) in zip(places, kept, strict=True):
                words = escape(f"{name}, step {step}: {number_text(value)}")
                drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"><title>{words}</title></circle>')
    grid = "".join(f"M{left} {y_of(value)}H{right}" for value, _ in marks)
    numbers = "".join(
        f'<text x="{left - 4}" y="{float(y_of(value)) + 4:.1f}" text-anchor="end">{text}</text>'
        for value, text in marks
    )
    for step, text in rounded_ticks(0, last, min(max(5, width // 100), int((right - left) / (number_width + 8)))):
        if step == round(step):
            x = left + step * scale_x
            grid += f"M{x:.1f} {bottom}v4"
            numbers += f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{text}</text>'
    heads = ((title, _TOP - 7, "bold"), *([(below, top - 7, "normal")] if below else []))
    head = "".join(
        f'<text x="4" y="{y}" font-weight="{weight}">{escape(shortened(text, int((width - 8) / _LETTER_WIDTH)))}'
        f"<title>{escape(text)}</title></text>"
        for text, y, weight in heads
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="max-width:100%;height:auto" '
        f'role="img" font-family="sans-serif" font-size="11" fill="currentColor">'
        f"{head}"
        f'<path d="{grid}" fill="none" stroke="currentColor" opacity="0.15"/>'
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor" opacity="0.5"/>{numbers}'
        f'<text x="{(left + right) // 2}" y="{height - 4}" text-anchor="middle">step</text>'
        f'<text transform="translate(11 {(top + bottom) // 2}) rotate(-90)" text-anchor="middle">{what}</text>'
        f"{''.join(drawn)}</svg>"
    )


# ---------------------------------------------------------------- a run in a notebook

_WIDTH = 110
"""Characters of the table in a notebook."""
_COLORS = TerminalTheme(
    (255, 255, 255),
    (0, 0, 0),
    [(128, 128, 128), (201, 95, 95), (64, 145, 90), (192, 116, 30), *[(90, 120, 200)] * 3, (128, 128, 128)],
)
"""Grey, red, green and yellow that can be read on a light and on a dark page."""
_BAR_BACK = Theme({"bar.back": "grey50"})


def run_html(view: RunView, *, most_charts: int | None = None) -> str:
    """Return a run as HTML: its table, the reasons of tasks, the charts of at most `most_charts` tasks, and its log."""
    # In a notebook, rich would otherwise display what is printed, in addition to recording it.
    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True, force_jupyter=False,
        color_system="standard", theme=_BAR_BACK,
    )  # fmt: skip
    console.print(RunTable(view, len(view.tasks) + 10))
    pre = "<pre style='line-height:1.3;max-height:34em;overflow:auto;white-space:pre'>{code}</pre>"
    table = console.export_html(theme=_COLORS, inline_styles=True, code_format=pre)
    reasons = escape("\n".join(f"{task.name}: {printable(task.reason)}" for task in view.tasks if task.reason))
    table += f"<pre style='white-space:pre-wrap'>{reasons}</pre>" if reasons else ""
    lines = ""
    if view.lines:
        text = escape("\n".join(view.lines))
        lines = f"<details open><summary>{len(view.lines)} lines</summary>{pre.format(code=text)}</details>"
    return f"<div><div><b>run</b> step {view.step:,}</div>{table}{charts_html(view, most_charts)}{lines}</div>"


def charts_html(view: RunView, most: int | None = None) -> str:
    """Return a small chart of each task's losses, below a legend.

    At most `most` tasks get one, those that run first.
    """
    tasks = view.with_losses
    shown = tasks if most is None else sorted(tasks, key=lambda task: task.status != "running")[:most]
    drawn = [chart_svg(task.name, [task], below=task.settings) for task in shown]
    meaning = legend([("train: loss of training rows", 0), ("eval (dashed): loss of held-out rows", 1)])
    key = f"<div>{meaning}</div>" if any(task.eval_losses for task in shown) else ""
    more = f"<div>... and {len(tasks) - len(shown)} more</div>" if len(tasks) > len(shown) else ""
    return f"{key}<div>{''.join(drawn)}</div>{more}"


# ---------------------------------------------------------------- pictures

_MOST_COLUMNS = 6


def draw_losses(tasks: Sequence[TaskView], kind: str = "png") -> bytes:
    """Draw the training and held-out losses of tasks, one panel each; return the picture.

    Args:
        tasks: the tasks, each with a curve.
        kind: format of the picture.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    columns = min(_MOST_COLUMNS, len(tasks) if len(tasks) < 4 else math.ceil(math.sqrt(len(tasks))))
    num_rows = math.ceil(len(tasks) / columns)
    # Inches, with a strip at the top for the title and the legend, which cover no curve there.
    strip = 0.75
    width, height = (5.6, 3.4 + strip) if len(tasks) == 1 else (4.2 * columns, 2.8 * num_rows + strip)
    figure = new_figure(figsize=(width, height))
    # Set by hand, because a layout that measures all texts takes seconds with many panels.
    figure.subplots_adjust(0.65 / width, 0.5 / height, 1 - 0.15 / width, 1 - (0.35 + strip) / height, 0.22, 0.5)
    drawn: dict[str, Any] = {}
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(num_rows, columns, index + 1)
        # A line through a single point cannot be seen.
        dots = "o-" if len(task.losses) == 1 else "-"
        for label, points, style, color in (
            ("train", task.losses, dots, "C0"),
            ("eval", task.eval_losses, "o--", "C1"),
        ):
            if points:
                (drawn[label],) = axes.plot(*zip(*points, strict=True), style, color=color, markersize=4)
        axes.set_title("\n".join(shortened(text, 44) for text in (task.name, task.settings) if text), fontsize=10)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
    meanings = {"train": "training rows", "eval": "held-out rows"}
    names = sorted(drawn, reverse=True)
    figure.suptitle("Loss of each task", y=1 - 0.12 / height, va="top")
    handles, labels = [drawn[name] for name in names], [f"{name}: {meanings[name]}" for name in names]
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1 - 0.38 / height), ncols=2, frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=120)
    return image.getvalue()


def plot_losses(view: RunView, path: Path) -> Path:
    """Draw the losses of all tasks that have any into a picture; return `path`.

    Raises:
        ConfigError: if matplotlib is not installed, or no loss was recorded.
        CheckpointError: if the file cannot be written.
    """
    if not view.with_losses:
        raise ConfigError("plots need a run that has logged at least once, got no loss in the records.")
    write_file(path, draw_losses(view.with_losses, path.suffix.removeprefix(".") or "png"))
    return path


# ---------------------------------------------------------------- report.html

_PAGE_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:76em;margin:2em auto;padding:0 1em;"
    "background:Canvas;color:CanvasText}table{border-collapse:collapse}"
    "td,th{padding:.15em .7em;border:0;vertical-align:top}td:first-child,th:first-child{padding-left:0}"
    "th{border-bottom:1px solid;text-align:left}h1{margin-bottom:.2em}h2{margin-top:1.6em;font-size:1.15em}"
    "pre{overflow:auto;line-height:1.3}svg{vertical-align:top}.note,.reason{opacity:.75}"
    # Drawings keep their letters readable on a small screen, and scroll sideways there.
    ".wide{overflow-x:auto}.wide svg{min-width:600px}"
)
_MOST_LINES = 10


def _line_legend(tasks: Sequence[TaskView]) -> str:
    colors = legend((task.title, number) for number, task in enumerate(tasks))
    return f"<div>{colors} solid: training rows, dashed: held-out rows</div>"


def _metrics_html(view: RunView) -> str:
    """Return a chart of each metric of the tasks, and a table of the last values; "" if there are none."""
    tasks = [task for task in view.tasks if task.metrics]
    charts, rows = [], [["metric", "task", "training rows", "held-out rows"]]
    for name in dict.fromkeys(name for task in tasks for name in task.metrics):
        curves = [(task, task.metrics.get(name, ((), ()))) for task in tasks]
        drawn = [replace(task, losses=values, eval_losses=held_out) for task, (values, held_out) in curves]
        charts.append(chart_svg(name, drawn[:_MOST_LINES], what="value"))
        for task, both in curves:
            if any(both):
                rows.append([name, task.title, *(f"{points[-1][1]:.4g}" if points else "-" for points in both)])
    table = f'<details><summary>last values</summary><div class="wide">{table_html(rows)}</div></details>'
    return f"<div>{''.join(charts)}</div>{_line_legend(tasks[:_MOST_LINES])}{table}" if tasks else ""


def page_html(
    title: str,
    report: RunReport,
    view: RunView,
    plan: Plan | None,
    steps: Sequence[MeasuredStep],
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, Any],
    remark: str,
) -> str:
    """Return the page of a run.

    Args:
        title: what the run is called.
        report: its tasks at the end, and what was learned about times.
        view: the curves of its tasks.
        plan: the plan of its steps with the most tasks; `None` if there was none.
        steps: its last step as each process measured it, by rank.
        config: all settings in effect, by section.
        versions: versions and devices, by name.
        remark: what else happened, such as an interruption; "" for nothing.
    """
    kinds = sorted({task.loss_kind for task in view.with_losses})
    losses = ""
    for kind in kinds:  # losses of two kinds share no axis
        tasks = [task for task in view.with_losses if task.loss_kind == kind]
        first = tasks[:_MOST_LINES]
        which = "all" if first == tasks else f"the first {_MOST_LINES} of {len(tasks)}"
        chart = chart_svg(f"Loss of {which} {kind} tasks", first, width=760, height=280 if len(kinds) == 1 else 200)
        losses += f'<div class="wide">{chart}</div>{_line_legend(first)}'
    losses += f"<p class=note>Each task by itself:</p>{charts_html(view)}" if len(view.with_losses) > 1 else ""
    measured = {f"process {rank.rank}": {"measured": rank.tensor_bytes} for rank in report.records if rank.tensor_bytes}
    of_measured = (
        "Measured is the peak of the memory allocated on the GPU; on the host, the weights and what a process took "
        "while it trained, because plans do not count Python and its libraries."
    )
    version_rows = [["name", "version"], *([name, str(value)] for name, value in versions.items())]
    sections = [
        ("Tasks", report._repr_html_()),
        ("Losses", losses),
        ("Metrics", _metrics_html(view)),
        ("A step, planned and measured", timeline_html(plan, steps)),
        ("Memory, planned and measured", "" if plan is None else memory_html(plan, measured, of_measured)),
        ("Versions and devices", f'<div class="wide">{table_html(version_rows)}</div>'),
        (
            "Configuration",
            "".join(
                f"<details><summary>{escape(name)}</summary><pre>{escape(str(text))}</pre></details>"
                for name, text in config.items()
            ),
        ),
    ]
    body = "".join(f"<h2>{name}</h2>{content}" for name, content in sections if content)

    rows = report.rows
    counts = Counter(status_word(row, report.is_interrupted) for row in rows)
    words = [f"{len(rows)} task{'' if len(rows) == 1 else 's'}"]
    words[0] += f" ({', '.join(f'{count} {status}' for status, count in counts.items())})" if rows else ""
    words.append(f"{counted(view.step, 'step')} of the run")
    words.append(f"{sum(row.num_tokens for row in rows):,} tokens")
    if report.records:
        words.append(f"{time_text(max(rank.seconds for rank in report.records))} of training")
        words.append(f"at most {bytes_text(max(rank.peak_bytes for rank in report.records))} of memory a process")
    headline = f"{', '.join(words)}. {remark}".strip()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_PAGE_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><div>{escape(headline)}</div>{body}</body></html>"
    )
