"""The pictures of README.md and docs/: `python -m tools.pictures` writes docs/pictures/*.svg.

`live_table.svg` shows a step of the demo's run, which takes a minute or two; `python -m tools.pictures --drawings`
writes only the others. `speed.svg` shows numbers of benchmarks/results. Each picture has colours for light and dark
pages.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from tools.shape import num_code_lines, read_package, wing_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
COMMAND = "python -m tools.pictures"
STEP_OF_THE_TABLE = 70

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#8c959f",
    "grey": "#e6eaef",
    "pale": "#f8f9fa",
    "a": "#b6d4fe",
    "b": "#ffd8a8",
    "c": "#b2e6c3",
    "bad": "#ffc9c9",
}
DARK = {
    "paper": "#161b22",
    "ink": "#e6edf3",
    "soft": "#9da7b3",
    "line": "#6e7681",
    "grey": "#30363d",
    "pale": "#1b2027",
    "a": "#1f4f8f",
    "b": "#8a5a13",
    "c": "#1f6b3a",
    "bad": "#8e2a2a",
}
FILLS = ("grey", "pale", "a", "b", "c", "bad")


class Drawing:
    """An SVG picture: shapes and texts are added from the back to the front."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Begin with an empty background."""
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 13) -> None:
        """Add a rectangle with a text in its middle; `fill` is a name of `LIGHT`."""
        self.parts.append(
            f'<rect class="{fill}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            'stroke-width="0.8"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            middle = y + height / 2 + size * 0.36 + (number - (len(lines) - 1) / 2) * size * 1.3
            self.text(x + width / 2, middle, line, size=size, anchor="middle")

    def text(self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", style: str = "ink") -> None:
        """Add a line of text; `style` is "ink", "soft" or "strong"."""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="t-{style}" {place}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add an arrow."""
        self.parts.append(
            f'<line class="edge" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the text of the file."""

        def rules(colours: dict[str, str]) -> str:
            fills = "".join(f".{name}{{fill:{colours[name]};stroke:{colours['line']}}}" for name in FILLS)
            return (
                f".paper{{fill:{colours['paper']}}}{fills}.t-ink,.t-strong{{fill:{colours['ink']}}}"
                f".t-soft{{fill:{colours['soft']}}}.edge{{stroke:{colours['line']}}}.head{{fill:{colours['line']}}}"
            )

        style = (
            "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}.t-strong{font-weight:600}"
            f".edge{{stroke-width:1.5}}{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


# ---------------------------------------------------------------- drawings


def stream() -> Drawing:
    """Rows of three tasks become one stream, which passes once through the backbone."""
    picture = Drawing(880, 470, "Rows of three tasks become one stream and one pass")
    tasks = {
        "sst2": ("a", [70, 110, 50]),
        "qa": ("b", [150, 90]),
        "sql": ("c", [120, 60, 110]),
    }
    places: list[tuple[str, str, float, float]] = []
    x, left = 60.0, 60.0
    for name, (colour, lengths) in tasks.items():
        picture.text(x, 34, f"rows of {name}", style="strong")
        for number, length in enumerate(lengths):
            picture.box(x, 46 + 24 * number, length, 18, colour)
        total = float(sum(lengths))
        places.append((name, colour, left, total))
        for length in lengths:
            picture.box(left, 156, length, 26, colour)
            left += length
        picture.arrow(x + 40, 122, places[-1][2] + total / 2, 150)
        x += 270
    picture.text(60, 206, "one stream: no padding; attention never crosses a row", style="soft")
    picture.box(60, 222, left - 60, 40, "grey", "frozen layer: one matrix product over the tokens of all tasks")
    for name, colour, begin, total in places:
        middle = begin + total / 2
        picture.arrow(middle, 262, middle, 284)
        picture.box(begin + 4, 286, total - 8, 34, colour, f"+ adapter of {name}")
        picture.arrow(middle, 320, middle, 342)
        picture.box(begin + 4, 344, total - 8, 34, colour, f"loss of {name}")
        picture.arrow(middle, 378, middle, 400)
        picture.box(begin + 4, 402, total - 8, 34, colour, f"optimizer step of {name}")
    picture.text(60, 458, "After the frozen layer, values of tasks never mix.", style="soft")
    return picture


def buckets() -> Drawing:
    """Tasks are fused into hTasks; hTasks of a bucket are interleaved in a pipeline of two stages."""
    picture = Drawing(880, 330, "hTasks are fused in space, buckets are interleaved in time")
    picture.box(60, 20, 230, 34, "a", "hTask 1 = sst2 + qa")
    picture.text(60, 72, "fused: their tokens share every pass", style="soft")
    picture.box(330, 20, 170, 34, "b", "hTask 2 = sql")
    picture.box(540, 20, 170, 34, "c", "hTask 3 = story")
    picture.text(330, 72, "bucket 1 = hTasks 1 and 2, bucket 2 = hTask 3", style="soft")
    # One-forward-one-backward over two stages; a backward takes twice as long as a forward.
    bucket_1 = [("1", "a"), ("2", "b"), ("1", "a"), ("2", "b")]
    bucket_2 = [("3", "c"), ("3", "c")]
    unit, start = 31.0, 106.0
    free = [0.0, 0.0]
    for micro_batches in (bucket_1, bucket_2):
        count = len(micro_batches)
        orders = [
            [("F", 0)]
            + [block for i in range(count) for block in ((("F", i + 1),) if i + 1 < count else ()) + (("B", i),)],
            [block for i in range(count) for block in (("F", i), ("B", i))],
        ]
        ends: dict[tuple[str, int, int], float] = {}
        waiting = [list(order) for order in orders]
        while any(waiting):
            for stage in (0, 1):
                if not waiting[stage]:
                    continue
                kind, number = waiting[stage][0]
                needed = ("F", 0, number) if kind == "F" else ("B", 1, number)
                if stage == (1 if kind == "F" else 0) and needed not in ends:
                    continue
                begin = max(free[stage], ends.get(needed, 0.0) if stage == (1 if kind == "F" else 0) else 0.0)
                length = 1.0 if kind == "F" else 2.0
                free[stage] = ends[kind, stage, number] = begin + length
                waiting[stage].pop(0)
                label, colour = micro_batches[number]
                picture.box(
                    start + unit * begin, 110 + 74 * stage, unit * length - 2, 44, colour, f"{kind}{label}", size=12
                )
    for stage in (0, 1):
        picture.text(20, 137 + 74 * stage, f"stage {stage}", style="strong")
    picture.arrow(start, 256, 860, 256)
    picture.text(855, 276, "time", anchor="end", style="soft")
    picture.text(start, 286, "F = forward, B = backward of one micro-batch; the number is the hTask.", style="soft")
    picture.text(
        start,
        308,
        "The planner chooses hTasks, buckets and the number of micro-batches by predicted cost.",
        style="soft",
    )
    return picture


def replicas() -> Drawing:
    """Long rows go to a replica of two processes, short rows to replicas of one."""
    picture = Drawing(880, 366, "Unequal replicas: long rows go where they fit, short rows go where they are cheap")
    picture.text(40, 34, "rows of one step, all tasks", style="strong")
    rows = [
        (220, "a", 0),
        (180, "b", 0),
        (90, "c", 1),
        (60, "a", 1),
        (80, "b", 1),
        (50, "c", 2),
        (70, "a", 2),
        (40, "c", 2),
        (56, "b", 2),
    ]
    for number, (length, colour, replica) in enumerate(rows):
        y = 48 + 30 * number
        picture.box(40, y, length, 20, colour)
        picture.arrow(46 + length, y + 10, 372, (84, 196, 288)[replica] + 5 * (number % 4) - 8)
    picture.box(380, 40, 270, 96, "grey")
    picture.text(392, 60, "replica 0: <2,1>", style="strong")
    picture.box(392, 70, 118, 56, "grey", "rank 0\nhalf of each layer", size=12)
    picture.box(520, 70, 118, 56, "grey", "rank 1\nhalf of each layer", size=12)
    for number in (1, 2):
        y = 160 + 92 * (number - 1)
        picture.box(380, y, 270, 74, "grey")
        picture.text(392, y + 20, f"replica {number}: <1,1>", style="strong")
        picture.box(392, y + 28, 246, 38, "grey", f"rank {number + 1}: all layers")
    for y in (88, 197, 289):
        picture.arrow(652, y, 706, 190)
    picture.box(710, 144, 150, 92, "grey", "sum of each task's\ngradients, then\none optimizer step\nper task")
    picture.text(40, 352, "<tensor parallel degree, pipeline degree>, as in LobRA", style="soft")
    return picture


def prefixes() -> Drawing:
    """Tokens that several rows begin with are computed once."""
    picture = Drawing(880, 290, "Shared prefixes are computed once")
    tails = [(90, "a"), (70, "b"), (120, "c"), (78, "bad")]
    picture.text(30, 30, "rows of one task", style="strong")
    for number, (length, colour) in enumerate(tails):
        y = 44 + 34 * number
        picture.box(30, y, 200, 24, "grey", "system prompt + examples", size=12)
        picture.box(230, y, length, 24, colour, "question", size=12)
    picture.text(30, 202, "4 prefixes + 4 questions", style="soft")
    picture.arrow(372, 110, 452, 110)
    picture.text(470, 30, "computed tokens", style="strong")
    picture.box(470, 95, 200, 24, "grey", "system prompt + examples", size=12)
    for number, (length, colour) in enumerate(tails):
        y = 44 + 34 * number
        picture.arrow(672, 107, 718, y + 12)
        picture.box(722, y, length, 24, colour, "question", size=12)
    picture.text(470, 202, "1 prefix + 4 questions", style="soft")
    picture.text(
        30,
        240,
        "Each question attends to the keys and values of the shared prefix; their gradients are added up.",
        style="soft",
    )
    picture.text(30, 264, "This is exact: losses and adapters are those of the rows computed separately.", style="soft")
    return picture


def isolation() -> Drawing:
    """What a task has to itself, what all tasks share, and what happens when one fails."""
    picture = Drawing(880, 410, "What each task has to itself, and what all tasks share")
    kept = ["rows and their order", "adapter, gradients", "optimizer, schedule", "random numbers", "callbacks, metrics"]
    for number, (name, colour) in enumerate((("sst2", "a"), ("qa", "bad"), ("sql", "c"))):
        x = 40 + 275 * number
        picture.text(x + 125, 34, f"task {name}", anchor="middle", style="strong")
        picture.box(x, 46, 250, 206, "grey")
        for place, text in enumerate(kept):
            is_bad = number == 1 and place == 1
            picture.box(x + 14, 58 + 38 * place, 222, 30, colour if number != 1 or is_bad else "b", text)
        if number == 1:
            picture.text(x + 125, 276, "loss is NaN: failed before its step,", anchor="middle")
            picture.text(x + 125, 294, "last good adapter saved", anchor="middle")
        else:
            picture.text(x + 125, 276, "trains on; no bit changes", anchor="middle")
            picture.text(x + 125, 294, "(same shapes) or within 1e-6", anchor="middle", style="soft")
    picture.box(40, 312, 800, 40, "grey", "shared and frozen: the backbone, read by all, written by none")
    picture.text(
        40,
        380,
        "A task's own code runs under a guard: an exception, a timeout of its data or a changed global setting fails "
        "that task only.",
        size=12,
        style="soft",
    )
    return picture


def rooms() -> Drawing:
    """The folders of the package, from what users write to what runs, and the way of one row."""
    picture = Drawing(880, 610, "The folders of peft_mux and the way of one row")
    levels = [
        [
            ("cli", "peft-mux"),
            ("serve", "over HTTP"),
            ("demo", "six tasks"),
            ("sweeps", "grids"),
            ("calls", "by calls"),
        ],
        [
            ("reporting", "tables, report, uploads"),
            ("planning", "facts for the scheduler"),
            ("generation", "completions"),
        ],
        [("trainer", "MultiTaskTrainer: the loop of a run")],
        [("checkpoint", "run folder, resume"), ("log", "numbers of every step")],
        [("parallel", "stages, shards, replicas"), ("engine", "passes, gradients, optimizers")],
        [("task", "Task"), ("from_trl", "TRL's settings"), ("arguments", "settings of a run")],
        [
            ("adapters", "other types"),
            ("losses", "other losses"),
            ("modeling", "backbone, LoRA, attention"),
        ],
        [
            ("storage", "safe files"),
            ("scheduler", "plans; no torch"),
            ("data", "rows to batches"),
            ("kernels", "LoRA, loss, AdamW"),
        ],
        [("user_code", "guard for a task's code"), ("errors", "messages")],
    ]
    modules = read_package(ROOT)
    for number, level in enumerate(levels):
        y = 20 + 58 * number
        width = (520 - 10 * (len(level) - 1)) / len(level)
        for place, (name, text) in enumerate(level):
            x = 30 + place * (width + 10)
            # The values of plans, which the core reads, are in a folder of a wing.
            lines = Counter[bool]()
            for module, source in modules.items():
                if f"{module}.".startswith(f"peft_mux.{name}."):
                    lines[not wing_of(module)] += num_code_lines(source)
            picture.box(x, y, width, 48, "grey" if lines[True] > lines[False] else "pale")
            picture.text(x + width / 2, y + 20, name, anchor="middle", style="strong")
            picture.text(x + width / 2, y + 38, text, size=11 if width > 140 else 10, anchor="middle", style="soft")
    rule = "A folder imports only from folders below it and to its right. trainer/trainer.py and the two registries"
    picture.text(30, 560, rule, style="soft")
    legend = "in modeling/ put all together. Grey: the core. Light: wings, which no module of the core imports."
    picture.text(30, 582, legend, style="soft")
    steps = [
        ("a", "1 row of a file", "data/sources.py"),
        ("a", "2 token ids and labels", "data/tokenize.py"),
        ("a", "3 global batch of the task", "data/dataset.py"),
        ("b", "4 passes of the step, by the plan", "data/packing/passes.py"),
        ("b", "5 packed stream of all tasks", "data/batch.py"),
        ("c", "6 forward with adapters", "modeling/model.py"),
        ("c", "7 loss of each task", "modeling/objectives"),
        ("c", "8 gradient, checked per task", "engine/executor.py"),
        ("c", "9 optimizer step of the task", "engine/tasks/optimizer.py"),
    ]
    for number, (colour, text, file) in enumerate(steps):
        y = 20 + 58 * number
        picture.box(590, y, 260, 44, colour)
        picture.text(602, y + 19, text)
        picture.text(602, y + 36, file, size=11)
        if number + 1 < len(steps):
            picture.arrow(720, y + 44, 720, y + 57)
    return picture


# ---------------------------------------------------------------- numbers


def speed() -> Drawing:
    """Tokens per second of stored results."""
    picture = Drawing(
        880, 400, "Tokens per second: HF one task at a time, padded joint batch, peft_mux, backbone alone"
    )
    throughput = json.loads((ROOT / "benchmarks/results/throughput-amd-epyc-2-cores.json").read_text("utf-8"))
    shared = json.loads((ROOT / "benchmarks/results/prefixes-amd-epyc-2-cores.json").read_text("utf-8"))
    names = {
        "hf": "HF, one task at a time",
        "padded": "padded joint batch",
        "mux": "peft_mux",
        "floor": "limit: backbone alone",
    }
    titles = {
        "uniform": "8 tasks, rows of similar length (SST-2)",
        "nonuniform": "8 tasks, short and long rows, ranks 8 to 64",
    }
    groups: list[tuple[str, list[tuple[str, float, str]]]] = []
    for case in throughput["cases"]:
        bars = [
            (names[bar["contender"]], bar["effective_tokens_per_s"], bar["contender"]) for bar in case["contenders"]
        ]
        groups.append((titles[case["mix"]], bars))
    row = next(measured for measured in shared["rows"] if measured["name"] == "4-shot: eight tasks of these")
    bars = [
        ("HF, one task at a time", row["tokens"] / row["hf_s"], "hf"),
        ("peft_mux, prefixes shared", row["tokens"] / row["share_s"], "mux"),
    ]
    groups.append(("8 tasks of 4-shot prompts (smaller model, 1 thread)", bars))
    y = 26.0
    for title, bars in groups:
        picture.text(24, y + 4, title, style="strong")
        longest = max(value for _, value, _ in bars)
        hf = next(value for _, value, kind in bars if kind == "hf")
        for number, (name, value, kind) in enumerate(bars):
            top = y + 16 + 23 * number
            length = 480 * value / longest
            picture.text(200, top + 14, name, size=12, anchor="end")
            picture.box(208, top, length, 18, {"mux": "c", "floor": "grey"}.get(kind, "a"))
            times = f" ({value / hf:.2f}x)" if kind in ("mux", "padded") else ""
            picture.text(214 + length, top + 14, f"{value:,.0f}{times}", size=12)
        y += 36 + 23 * len(bars)
    machine = throughput["hardware"]
    picture.text(
        24,
        y + 14,
        f"Tokens/s without padding, whole steps, fp32, {machine['cores']} cores of an {machine['cpu']}, torch "
        f"{throughput['versions']['torch'].partition('+')[0]}.",
        size=12,
        style="soft",
    )
    picture.text(
        24,
        y + 32,
        "Limit (the docs call it floor): the packed tokens through the backbone, without adapters and optimizer.",
        size=12,
        style="soft",
    )
    picture.height = round(y + 48)
    return picture


DRAWINGS = {
    "architecture": rooms,
    "buckets": buckets,
    "isolation": isolation,
    "prefixes": prefixes,
    "replicas": replicas,
    "speed": speed,
    "stream": stream,
}


def live_table() -> str:
    """Return the live table of the demo's run after some steps, as SVG."""
    from rich.console import Console
    from transformers import TrainerCallback

    from peft_mux.demo import run
    from peft_mux.demo.task_rows import demo_tasks
    from peft_mux.reporting.table import RunTable
    from peft_mux.reporting.views import RunWatch

    class Photographer(TrainerCallback):
        """Keeps the table of one step."""

        def __init__(self) -> None:
            self.watch = RunWatch()
            self.svg = ""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.watch.start(trainer.table)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watch.advance(trainer.table)
            if state.global_step == STEP_OF_THE_TABLE:
                console = Console(record=True, width=98, height=24, file=io.StringIO(), force_terminal=True)
                console.print(RunTable(self.watch.view()))
                self.svg = console.export_svg(title="peft-mux demo", unique_id="table")
                control.should_training_stop = True

    with tempfile.TemporaryDirectory(prefix="peft-mux-pictures-") as folder:
        root, tasks, photographer = Path(folder), demo_tasks(), Photographer()
        backbone, tokenizer = run._prepare(tasks, root, num_steps=120)
        trainer = run._trainer(backbone, tokenizer, tasks, root, num_steps=120)
        trainer.add_callback(photographer)
        trainer.train()
    # Pictures load nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\n\s*", "", photographer.svg, flags=re.DOTALL)


def main() -> None:
    """Write the pictures."""
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    if "--drawings" not in sys.argv[1:]:
        (FOLDER / "live_table.svg").write_text(live_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
