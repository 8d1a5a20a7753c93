"""`python -m benchmarks.planner`."""

from benchmarks.planner.times import main

if __name__ == "__main__":
    raise SystemExit(main())
