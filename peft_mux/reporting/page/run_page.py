"""`report.html`: what came of a run, on one page that needs no network and no script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from peft_mux.reporting.page.charts import Line, chart_svg
from peft_mux.reporting.page.measured import MeasuredStep, timeline_html
from peft_mux.reporting.page.parts import charts_html
from peft_mux.reporting.report import RankRecord, RunReport, status_word
from peft_mux.reporting.views import RunView
from peft_mux.reporting.words import counted, time_text
from peft_mux.scheduler.pipeline.svg import legend, memory_legend, memory_svg
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.plan_html import planned_parts

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:76em;margin:2em auto;padding:0 1em;"
    "background:Canvas;color:CanvasText}table{border-collapse:collapse}"
    "td,th{padding:.15em .7em;border:0;vertical-align:top}td:first-child,th:first-child{padding-left:0}"
    "th{border-bottom:1px solid}h1{margin-bottom:.2em}h2{margin-top:1.6em;font-size:1.15em}"
    "pre{overflow:auto;line-height:1.3}svg{vertical-align:top}.note,.reason{opacity:.75}"
    # Drawings keep letters that can be read on a small screen, and move sideways there.
    ".wide{overflow-x:auto}.wide svg{min-width:600px}"
)
_MOST_LINES = 10


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the page of a run is made of.

    Attributes:
        title: what the run is called.
        report: its tasks at the end, and what was learnt of times.
        view: the curves of its tasks.
        plan: the plan that was followed for most steps; `None` where there was none.
        steps: its last step as each process measured it, by rank.
        records: what each process has done, by rank.
        config: all settings in effect, by section.
        versions: versions and devices, by name.
        remark: what else came of it, such as that it was interrupted; "" for nothing.
        is_host: whether the memory that processes measured is that of the host, with Python and its libraries.
    """

    title: str
    report: RunReport
    view: RunView
    plan: Plan | None
    steps: Sequence[MeasuredStep]
    records: Sequence[RankRecord]
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    remark: str
    is_host: bool


def page_html(facts: RunFacts) -> str:
    """Return the page."""
    sections = [
        ("Tasks", facts.report._repr_html_()),
        ("Losses", _curves(facts.view)),
        ("A step, planned and measured", timeline_html(facts.plan, facts.steps)),
        ("Memory, planned and measured", _memory(facts)),
        ("Versions and devices", _pairs(facts.versions)),
        ("Configuration", "".join(map(_details, facts.config.items()))),
    ]
    body = "".join(f"<h2>{name}</h2>{content}" for name, content in sections if content)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(facts.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(facts.title)}</h1><div>{escape(_headline(facts))}</div>{body}</body></html>"
    )


def _headline(facts: RunFacts) -> str:
    """Return what came of the run in one line."""
    rows = facts.report.rows
    counts = Counter(status_word(row, facts.report.is_interrupted) for row in rows)
    words = [f"{len(rows)} task{'' if len(rows) == 1 else 's'}"]
    words[0] += f" ({', '.join(f'{count} {status}' for status, count in counts.items())})" if rows else ""
    words.append(f"{counted(facts.view.step, 'step')} of the run")
    words.append(f"{sum(row.num_tokens for row in rows):,} tokens")
    words += [f"{time_text(max(one.seconds for one in facts.records))} of training"] if facts.records else []
    return f"{', '.join(words)}. {facts.remark}".strip()


def _curves(view: RunView) -> str:
    tasks = [task for task in view.tasks if task.losses]
    lines = [Line(task.name, task.losses, number) for number, task in enumerate(tasks[:_MOST_LINES])]
    more = f" (the first {_MOST_LINES} of {len(tasks)} tasks)" if len(tasks) > _MOST_LINES else ""
    names = legend([line.name for line in lines])
    return (
        f'<div class="wide">{chart_svg(f"loss of training rows{more}", lines, width=760, height=260)}</div>'
        f"<div>{names}</div>"
        f"<p class=note>Each task by itself: training rows in blue, held-out rows in orange.</p>{charts_html(view)}"
    )


def _memory(facts: RunFacts) -> str:
    if facts.plan is None:
        return ""
    rows = [("planned", planned_parts(facts.plan))]
    rows += [(f"process {one.rank}", [("measured", float(one.peak_bytes))]) for one in facts.records if one.peak_bytes]
    of_host = (
        " Measured is the most that a process has held of the host, with Python and all its libraries, which no plan "
        "counts."
        if facts.is_host
        else " Measured is the most that was allocated on the GPU."
    )
    return (
        f'<div class="wide">{memory_svg(rows, facts.plan.limit_bytes, facts.plan.device_bytes)}</div>'
        f"<div>{memory_legend([*facts.plan.memory.parts, *['measured'] * (len(rows) > 1)])}</div>"
        f"<p class=note>Planned is the peak of the fullest stage, an analytic estimate.{of_host}</p>"
    )


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in pairs.items())
    return f'<div class="wide"><table>{rows}</table></div>'


def _details(section: tuple[str, Any]) -> str:
    name, text = section
    return f"<details><summary>{escape(name)}</summary><pre>{escape(str(text))}</pre></details>"
