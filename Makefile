# Everything runs in a virtual environment of its own: `make demo` and `make test` set it up on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine with CUDA: make demo TORCH_SPEC="torch>=2.11"
TORCH_SPEC ?= torch==2.13.0
# One process a core; each computes on one thread. Files run in the order of tests/conftest.py, the long ones first.
PYTEST_ARGS ?= --numprocesses auto --dist loadfile --no-loadscope-reorder
# What has been compiled is kept for the processes that tests start, and for the next run.
test test-slow-ci test-slow attack: export PYTHONDONTWRITEBYTECODE =

# Slow tests that CI runs too: checkpoints and kills, layouts of processes, evaluation, examples on real data, whole
# steps on a pretended GPU, and a part of the attacks.
SLOW_CI := tests/checkpoint tests/cli tests/engine tests/evaluation tests/examples tests/pretended_cuda tests/attacks tests/trl \
	tests/modeling tests/generation tests/tools tests/ptx tests/kernels tests/test_packaging.py \
	tests/benchmarks/test_gpu.py tests/benchmarks/test_gpu_many.py

.PHONY: demo test test-slow-ci test-slow attack lint types shape docs bench clean

# torch comes first and on its own, so that its CPU build is taken where the index offers one.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH_SPEC)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,plots,notebooks]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m peft_mux demo

# The fast tests; those of real inputs read ../shared/data, and are skipped where there is none.
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Launches are compiled for the oldest and the newest cards here; `make test-slow` does so for those between, and for other widths,
# and rehearses the GPU benchmarks in Triton's interpreter too (`[kernels]`).
CARDS := tests/pretended_cuda/test_compiled.py::test_every_launch_of_training_compiles_for_a_card
WIDTHS := tests/kernels/lora/test_compile.py::test_a_kernel_of_other_widths_and_types_fits_too
# About half an hour on 2 cores.
test-slow-ci: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "slow and not gpu" --deselect "$(CARDS)[86]" --deselect "$(CARDS)[89]" \
		--deselect "$(CARDS)[90]" --deselect "$(WIDTHS)" -k "not [kernels]" $(SLOW_CI)

# All slow tests, one after another.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow and not gpu"

# Every attack on a run, its files and its processes; at the end stands how many there were of each kind.
attack: $(VENV)/.ready
	PEFT_MUX_ATTACKS=full $(BIN)/python -m pytest $(PYTEST_ARGS) -m "slow or not slow" tests/attacks

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

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
