"""The benchmark of the service measures every number that the service holds, over HTTP; here on tiny inputs."""

from __future__ import annotations

import pytest

from benchmarks.service.__main__ import PARTS, Row, main

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("part", "numbers"),
    [("throughput", 5), ("overhead", 1), ("neighbours", 1), ("exactness", 2), ("many_models", 3)],
)
def test_each_part_measures_its_numbers(part: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    measure = PARTS[part]

    def keep(*arguments: object) -> list[Row]:
        rows.extend(measure(*arguments))  # type: ignore[arg-type]
        return rows

    monkeypatch.setitem(PARTS, part, keep)
    main(["--rehearse", "--only", part])
    assert len(rows) == numbers
    assert all(row.value >= 0 and len(row.cells()) == 3 for row in rows)
    assert part != "exactness" or all(row.holds for row in rows)
