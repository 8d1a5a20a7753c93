"""Looks at the products that a backward pass makes with frozen weights."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.kernels.lora import reference


def rows_left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each product adds how many rows it was not made for."""
    counts: list[int] = []
    plain = reference._base_input_gradient

    def noted(x: Any, dys: Any, weights: Any, needed: Any = None) -> Any:
        counts.append(0 if needed is None else len(x) - sum(end - start for start, end in needed))
        return plain(x, dys, weights, needed)

    monkeypatch.setattr(reference, "_base_input_gradient", noted)
    return counts
