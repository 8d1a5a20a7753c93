# Everything runs in a virtual environment of its own: `make demo` and `make test` set it up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine with CUDA: make demo TORCH_SPEC="torch>=2.11"
TORCH_SPEC ?= torch==2.13.0
# One process a core; each computes on one thread. Files run in the order of tests/conftest.py, the long ones first.
PYTEST_ARGS ?= --numprocesses auto --dist loadfile --no-loadscope-reorder
# The fast tests; .ci/run asks for the slow ones too.
TESTS ?= not slow and not nightly and not gpu
# What has been compiled is kept for the processes that tests start, and for the next run.
test test-nightly test-times attack: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo serve-demo test test-nightly test-times attack lint types shape docs bench clean

PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# What running needs. torch comes first and on its own, so that its CPU build is taken where the index offers one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing torch and the package into $(VENV), which takes one to three minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH_SPEC)"
	@$(PIP) --constraint constraints.txt --editable ".[plots]"
	@touch $@

$(VENV)/.ready: $(VENV)/.installed
	@echo "Installing what tests, checks and notebooks need ..."
	@$(PIP) --constraint constraints.txt --editable ".[test,plots,notebooks,serve]"
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/python -m peft_mux demo

# A fine-tuning service with two tenants, killed and started again while they train; each equal to alone.
serve-demo: $(VENV)/.ready
	@$(BIN)/python examples/serve_demo.py

# Tests of real inputs read ../shared/data, and are skipped where there is none.
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(TESTS)"

# What takes long and rarely fails; CONTRIBUTING.md says which part to run after which change: make test-nightly PARTS=tests/ptx
PARTS ?= tests
test-nightly: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "nightly and not gpu" $(PARTS)

# CPU seconds by folder and of the dearest tests: make test-times TESTS="not nightly and not gpu" for all that CI runs
test-times: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(TESTS)" -p tests.times

# Every attack on a run, its files and its processes; at the end stands how many there were of each kind. Tenants of a
# service come and go for some minutes; two hours: make attack SOAK_S=7200
SOAK_S ?= 300
attack: $(VENV)/.ready
	PEFT_MUX_ATTACKS=full PEFT_MUX_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not gpu" tests/attacks

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.plain_words

types: $(VENV)/.ready
	$(BIN)/pyright --pythonpath $(BIN)/python

# Size and structure in numbers, and what a run of two steps enters; two checkouts: make shape CHECKOUTS="/tmp/before ."
CHECKOUTS ?= .
shape: $(VENV)/.ready
	@$(BIN)/python tools/shape.py --run $(CHECKOUTS)

# The site in site/; any warning fails it.
docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.training.throughput

clean:
	rm -rf $(VENV) runs
