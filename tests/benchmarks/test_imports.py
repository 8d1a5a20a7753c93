"""Every module of the benchmarks can be imported, so that a name which the package no longer has is seen at once."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.paths import ROOT


def test_every_module_can_be_imported() -> None:
    for package in ("triton", "pulp"):
        pytest.importorskip(package)
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")]
    assert len(names) > 90
    for name in names:
        importlib.import_module(name)
