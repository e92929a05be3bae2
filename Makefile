# Two commands: `make demo` trains a language model on this machine, `make test` proves the code.
# Both make their own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, each of which would otherwise compile the project anew.
export PYTHONDONTWRITEBYTECODE :=
# Files of tests that run at the same time; each keeps its own processes.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# pip would compile five times as many modules as the tests import, one after the other. The release
# that Python brings reads the lists of packages several times slower than the newest one.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: demo test quick exhaustive gpu docs lint style types tests install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $(STAMP)

# The shell keeps one run folder for both halves of the demo.
demo: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" sh examples/demo.sh

# Types are checked beside the tests, of which the first only import.
test: style
	$(MAKE) --no-print-directory -j 2 types tests

tests: $(STAMP)
	$(PYTEST) -m 'not exhaustive'

quick: $(STAMP)
	$(PYTEST) -m 'not slow and not exhaustive'

# Every layout of the matrix, where `make test` has every pair of settings.
exhaustive: $(STAMP)
	$(BIN)/python -m pytest -m exhaustive

# Kernels, techniques, layers and rates on one GPU, in some twenty minutes; results in benchmarks/results.
gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu

# Every figure and picture that a page quotes, by the command that makes it; measured ones from their latest results.
docs: $(STAMP)
	$(BIN)/python -m fivefold.docs
	$(BIN)/python -m benchmarks.pages
	$(BIN)/python -m benchmarks.picture

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
