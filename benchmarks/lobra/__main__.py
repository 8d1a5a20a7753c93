"""`python -m benchmarks.lobra`."""

from benchmarks.lobra.steps import main

if __name__ == "__main__":
    main()
