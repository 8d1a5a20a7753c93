"""A run as HTML: a table with bars, and a small chart of each task."""

from __future__ import annotations

from html import escape

from peft_mux.reporting.page.charts import Line, chart_svg
from peft_mux.reporting.views import RunView, TaskView
from peft_mux.reporting.words import number_text, rate_text, share_text, time_text

# Text and lines have the colour of what is around them, so that both themes of a notebook suit.
_STYLE = (
    "<style>.peft-mux table{border-collapse:collapse;margin:.3em 0}.peft-mux td,.peft-mux th{padding:.15em .7em;"
    "text-align:right;border:0}.peft-mux th{border-bottom:1px solid currentColor}.peft-mux .l{text-align:left}"
    ".peft-mux .bar{display:inline-block;width:9em;height:.7em;background:rgba(128,128,128,.3);border-radius:.2em}"
    ".peft-mux .bar i{display:block;height:100%;border-radius:.2em;background:#4fa86b}"
    ".peft-mux .failed i{background:#c95f5f}.peft-mux .paused i,.peft-mux .waiting i,"
    ".peft-mux .interrupted i{background:#e08a2e}"
    ".peft-mux .failed .s{color:#c95f5f;font-weight:bold}.peft-mux .box{max-height:34em;overflow:auto}"
    ".peft-mux pre{line-height:1.3}.peft-mux td.l:first-child{white-space:nowrap}.peft-mux .why td{opacity:.8;"
    "white-space:pre-wrap}.peft-mux svg{vertical-align:top}</style>"
)
_ARROWS = {"down": "&#8595;", "up": "&#8593;", "flat": "&#8594;", "": ""}
_HEADS = ("task", "status", "done", "step", "loss", "eval", "tokens/s", "eta")
_MOST_CHARACTERS = 400


def run_html(view: RunView, *, most_charts: int | None = None) -> str:
    """Return a run as HTML, without scripts.

    Args:
        view: the run, with its curves.
        most_charts: so many tasks get a chart, those that run first; `None` for all.
    """
    parts = [_STYLE, _head(view), f'<div class="box">{task_table(view)}</div>', charts_html(view, most_charts)]
    if view.lines:
        lines = escape("\n".join(view.lines))
        parts.append(
            f"<details open><summary>{len(view.lines)} lines</summary><div class='box'><pre>{lines}</pre></div>"
        )
        parts.append("</details>")
    return f'<div class="peft-mux">{"".join(parts)}</div>'


def _head(view: RunView) -> str:
    words = ["interrupted"] * view.is_interrupted + [f"step {view.step:,}", time_text(view.seconds)]
    words += [f"{time_text(view.left_s)} left"] if view.left_s is not None else []
    words += [f"{rate_text(view.tokens_per_s)} tokens/s"] if view.tokens_per_s else []
    if view.memory_bytes is not None and view.total_bytes:
        words.append(f"memory {view.memory_bytes / 2**30:.2f}/{view.total_bytes / 2**30:.1f} GiB")
    return f"<div><b>run</b> {', '.join(words)}</div>"


def task_table(view: RunView) -> str:
    """Return the table of all tasks."""
    shares = [f"of {view.share_of}"] * view.shows_shares
    heads = "".join(
        f"<th{' class=l' if name in ('task', 'status', 'done') else ''}>{name}</th>" for name in (*_HEADS, *shares)
    )
    rows = "".join(_row(task, shows_share=view.shows_shares) for task in view.tasks)
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _row(task: TaskView, *, shows_share: bool) -> str:
    done = 100 * task.step / max(task.num_steps, 1)
    reason = f' title="{escape(task.reason)}"' if task.reason else ""
    share = f"<td>{share_text(task.share)}</td>" if shows_share else ""
    return (
        f'<tr class="{escape(task.status)}"{reason}><td class=l>{escape(task.name)}</td><td class="l s">'
        f'{escape(task.status)}</td><td class=l><span class=bar><i style="width:{done:.1f}%"></i></span></td>'
        f"<td>{task.step:,}/{task.num_steps:,}</td><td>{number_text(task.loss)} {_ARROWS[task.trend]}</td>"
        f"<td>{number_text(task.eval_loss)}</td><td>{rate_text(task.tokens_per_s)}</td>"
        f"<td>{time_text(task.left_s)}</td>{share}</tr>{_why(task, len(_HEADS) + shows_share)}"
    )


def _why(task: TaskView, num_columns: int) -> str:
    """Return a row that says why a task failed; other reasons are told where one points at the task."""
    if task.status != "failed" or not task.reason:
        return ""
    return f'<tr class="why"><td class=l colspan={num_columns}>{escape(task.reason[:_MOST_CHARACTERS])}</td></tr>'


def charts_html(view: RunView, most: int | None = None) -> str:
    """Return a small chart of the losses of each task, of training rows in blue, of held-out rows in orange with dots.

    Args:
        view: the run, with its curves.
        most: so many charts, those of tasks that run first; `None` for all.
    """
    tasks = [task for task in view.tasks if task.losses or task.eval_losses]
    shown = tasks if most is None else sorted(tasks, key=lambda task: task.status != "running")[:most]
    drawn = [
        chart_svg(task.name, [Line("loss", task.losses), Line("eval", task.eval_losses, 1, has_dots=True)])
        for task in shown
    ]
    more = f"<div>... and {len(tasks) - len(shown)} more</div>" if len(tasks) > len(shown) else ""
    return f"<div>{''.join(drawn)}</div>{more}"
