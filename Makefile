# Two commands on a fresh machine: `make demo` and `make test`. Only Python (3.11 or later) is needed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 2
LONG_JOBS ?= 3
SAMPLE ?= 60
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses

.PHONY: demo install-dev test test-long test-kernels test-all fuzz slurm chaos mutants style types lint clean bench-data

# The stamps say what is installed; it is done anew when the dependencies change.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	$(BIN)/lm_pcfg train --config configs/tiny.yaml
	echo "the small doctor tastes the dogs" | $(BIN)/lm_pcfg parse - --format text
	$(BIN)/lm_pcfg score embedded:test

install-dev: $(VENV)/.installed-dev

# At most 8 minutes on 2 cores.
test: $(VENV)/.installed-dev
	$(PYTEST) $(JOBS) -m "not long and not chaos and not kernels"

# Those marked `long`: the demo, launchers, engines, faults, SLURM, every specialisation of a kernel compiled.
# One process more than there are cores: the tests of SLURM and of faults mostly wait.
test-long: $(VENV)/.installed-dev
	$(PYTEST) $(LONG_JOBS) -m "long and not chaos and not kernels"

# What kernels need many minutes for without a GPU: long sentences in the interpreter.
test-kernels: $(VENV)/.installed-dev
	$(PYTEST) $(JOBS) -m kernels

test-all: test test-long

# The property tests with examples never seen before (`make test` takes the same ones each time).
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --hypothesis-profile=fuzz $$(grep -l "from hypothesis" tests/test_*.py)

# The long version of tests/test_slurm.py; needs root, and apt-get install slurm-wlm munge.
slurm: $(VENV)/.installed-dev
	$(BIN)/python tests/slurm_long.py

# 25 kills of processes that train together, under DDP and under DeepSpeed, every signal to every process, every single
# bit of what lies beside the tensors, a kill, an I/O error, a full disk and a power cut at every file operation, and
# 5,000 fuzzed configs, overrides, states, manifests, indexes, vocabularies and shards (-rP shows their counts).
chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos.py --kills 25
	$(BIN)/python tests/chaos.py --kills 25 --zero-stage 2
	$(BIN)/python -m pytest -m chaos -rP

# Mutants of the dynamic programmes, streams, storage and learners, and which of them no test notices: tests/mutants.py.
# An hour or so for 60 on 2 cores; interrupted, it goes on.
mutants: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --editable ".[dev,mutants]"
	$(BIN)/python tests/mutants.py --sample $(SAMPLE) --jobs $(JOBS)

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

lint: style types

# An epoch of 10 million lines without a model: words a second, and memory that does not grow. About 5 minutes.
bench-data: $(VENV)/.installed
	$(BIN)/lm_pcfg bench data --lines 10000000

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
