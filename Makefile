# Two commands on a fresh machine: `make demo` and `make test`. Only Python (3.11 or later) is needed; another one than
# the first that fits is given by PYTHON=python3.12.
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 2
LONG_JOBS ?= 3
SAMPLE ?= 60
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses

.PHONY: demo install install-dev test test-long test-kernels test-all fuzz slurm chaos mutants style types lint clean bench-data

# Both do nothing if it is done: launch/environment.sh. Installed anew when the dependencies or PYTHON change.
install:
	@launch/environment.sh $(VENV) "" $(PYTHON)

install-dev:
	@launch/environment.sh $(VENV) dev $(PYTHON)

# The last line of standard output is the perplexity; all that explains goes to standard error.
demo: install
	@echo "1/4 train a grammar on the embedded corpus: about 3 minutes on one core" >&2
	@$(BIN)/lm_pcfg train --config configs/tiny.yaml
	@echo "2/4 draw the tree of a sentence" >&2
	@echo "the small doctor tastes the dogs" | $(BIN)/lm_pcfg parse - --format text
	@echo "3/4 sample a sentence from the grammar" >&2
	@$(BIN)/lm_pcfg sample -n 1 --seed 1
	@echo "4/4 score a held-out text beside the best possible" >&2
	@printf '%s\n' "Next:" "  . $(BIN)/activate" "  lm_pcfg parse embedded:test" \
	  "  mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db" >&2
	@$(BIN)/lm_pcfg score embedded:test

# At most 8 minutes on 2 cores.
test: install-dev
	$(PYTEST) $(JOBS) -m "not long and not chaos and not kernels"

# Those marked `long`: the demo, launchers, engines, faults, SLURM, every specialisation of a kernel compiled.
# One process more than there are cores: the tests of SLURM and of faults mostly wait.
test-long: install-dev
	$(PYTEST) $(LONG_JOBS) -m "long and not chaos and not kernels"

# What kernels need many minutes for without a GPU: long sentences in the interpreter.
test-kernels: install-dev
	$(PYTEST) $(JOBS) -m kernels

test-all: test test-long

# The property tests with examples never seen before (`make test` takes the same ones each time).
fuzz: install-dev
	$(BIN)/python -m pytest --hypothesis-profile=fuzz $$(grep -l "from hypothesis" tests/test_*.py)

# The long version of tests/test_slurm.py; needs root, and apt-get install slurm-wlm munge.
slurm: install-dev
	$(BIN)/python tests/slurm_long.py

# 25 kills of processes that train together, under DDP and under DeepSpeed, every signal to every process, every single
# bit of what lies beside the tensors, a kill, an I/O error, a full disk and a power cut at every file operation, and
# 5,000 fuzzed configs, overrides, states, manifests, indexes, vocabularies and shards (-rP shows their counts).
chaos: install-dev
	$(BIN)/python tests/chaos.py --kills 25
	$(BIN)/python tests/chaos.py --kills 25 --zero-stage 2
	$(BIN)/python -m pytest -m chaos -rP

# Mutants of the dynamic programmes, streams, storage and learners, and which of them no test notices: tests/mutants.py.
# An hour or so for 60 on 2 cores; interrupted, it goes on.
mutants: install-dev
	$(BIN)/pip install --quiet --editable ".[dev,mutants]"
	$(BIN)/python tests/mutants.py --sample $(SAMPLE) --jobs $(JOBS)

style: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

lint: style types

# An epoch of 10 million lines without a model: words a second, and memory that does not grow. About 5 minutes.
bench-data: install
	$(BIN)/lm_pcfg bench data --lines 10000000

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
