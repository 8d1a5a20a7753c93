"""Pages as a browser lays them out: nothing sticks out of a small screen, and letters stand out from what is behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from peft_mux.reporting.page import run_html
from peft_mux.reporting.views import RunView, TaskView
from tests.runs import small_tasks, trainer_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the PATH")

LONG = "a-task-whose-name-is-longer-than-most-columns-have-room-for"
WIDTHS = (400, 1400)
SCRIPT = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement, body = page.body;
    const all = [...page.querySelectorAll("h1, h2, td, th, p, summary, svg text")];
    const outside = one => !one.closest(".wide, .box, div[style*=overflow-x], pre");
    return {
      name: frame.name, width: root.clientWidth, needed: root.scrollWidth,
      hidden: all.filter(one => one.getClientRects().length && outside(one)
        && one.getBoundingClientRect().right > root.clientWidth + 1).map(one => one.textContent),
      clipped: [...page.querySelectorAll("svg text")].filter(one => {
        const own = one.getBoundingClientRect(), all = one.closest("svg").getBoundingClientRect();
        return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1;
      }).map(one => one.textContent),
      letters: [...page.querySelectorAll("svg text")].map(one => one.getBoundingClientRect().height),
    };
  });
  document.body.dataset.found = JSON.stringify(found);
});
"""


def laid_out(pages: dict[str, str], folder: Path) -> dict[tuple[str, int], dict]:
    """Return what a browser makes of pages at each width: its width, the width that it needs, and what is hidden."""
    frames = "".join(
        f'<iframe name="{name}" style="width:{width}px;height:900px" srcdoc="{escape(html, quote=True)}"></iframe>'
        for name, html in pages.items()
        for width in WIDTHS
    )
    wrapper = folder / "all.html"
    wrapper.write_text(f"<body>{frames}<script>{SCRIPT}</script></body>", encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match is not None, done.stderr[-2000:]
    found = json.loads(unescape(match.group(1)))
    keys = [(name, width) for name in pages for width in WIDTHS]
    return dict(zip(keys, found, strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict]:
    folder = tmp_path_factory.mktemp("browser")
    trainer = trainer_of(folder / "run", small_tasks("a", LONG), logging_steps=1, save_steps=4)
    plan = trainer.plan()._repr_html_()
    trainer.train()
    losses = tuple((step, 9.0 / step) for step in range(1, 60))
    tasks = [TaskView(LONG, "failed", 3, 60, "a reason of many words " * 20, losses=losses)]
    tasks += [TaskView(f"t{number}", "running", 5, 9, "", 1.0, "down", losses=losses) for number in range(30)]
    pages = {
        "report": (folder / "run" / "report.html").read_text(encoding="utf-8"),
        "notebook": run_html(RunView(tuple(tasks), 5, 9.0, 2**30, 2**31, ("a line of a log " * 30,))),
        "plan": plan,
        "table": trainer.report()._repr_html_(),
    }
    return laid_out(pages, folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["report", "notebook", "plan", "table"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways_and_nothing_is_cut_off(
    found: dict[tuple[str, int], dict], page: str, width: int
) -> None:
    one = found[page, width]
    assert one["needed"] <= one["width"], one
    assert (one["hidden"], one["clipped"]) == ([], [])


@pytest.mark.parametrize("width", WIDTHS)
def test_letters_of_drawings_can_be_read_on_a_small_screen_too(found: dict[tuple[str, int], dict], width: int) -> None:
    letters = found["report", width]["letters"]
    assert len(letters) > 20
    assert min(letters) >= 8
