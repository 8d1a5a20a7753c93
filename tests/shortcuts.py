"""A short run also draws pictures and asks git for a commit; tests of other things leave that out to save time."""

from __future__ import annotations

import base64

import pytest

from peft_mux.checkpoint import saver
from peft_mux.planning import planner
from peft_mux.reporting import hub, page

_EMPTY = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""A PNG of one point."""


def take_shortcuts(patch: pytest.MonkeyPatch, *, is_rank: bool = False) -> None:
    """Write empty pictures of losses, and do not ask git for the commit of the script, from now on.

    Args:
        patch: what undoes it.
        is_rank: whether this is one process of several, which would all count the same bytes of activations: they
            get a number.
    """
    for module in (page, hub):
        patch.setattr(module, "draw_losses", lambda tasks, kind="png": _EMPTY)
    patch.setattr(saver, "commit_of_script", lambda: None)
    if is_rank:
        patch.setattr(planner, "count_activation_bytes_per_token", lambda *model, **how: 4096.0)
