"""Lets `python -m benchmarks.papers` run `benchmarks/papers/run.py`."""

from benchmarks.papers.run import main

if __name__ == "__main__":
    raise SystemExit(main())
