# Everything runs in a virtual environment of its own: `make demo` and `make test` set it up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine with CUDA: make demo TORCH_SPEC="torch>=2.11"
TORCH_SPEC ?= torch==2.13.0
# One process a core; each computes on one thread.
PYTEST_ARGS ?= --numprocesses auto --dist loadfile

.PHONY: demo test test-slow lint types bench plan clean

# torch comes first and on its own, so that its CPU build is taken where the index offers one.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH_SPEC)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,plots,notebooks]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m peft_mux demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.throughput

clean:
	rm -rf $(VENV) runs
