# The few verbs of this project. `make help` lists them.
#
# Each environment is installed once: its stamp is newer than pyproject.toml afterwards.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format bench clean

help:  ## List the verbs.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(VENV)/.installed  ## Run the built-in model: a prompt completed, a chat turn answered, the speed shown.
	$(BIN)/verax demo --output demo

test: $(VENV)/.installed-dev  ## Every test that needs no GPU.
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(VENV)/.installed-dev  ## The tests that need an NVIDIA GPU.
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(VENV)/.installed-dev  ## Formatter, linter and type checker.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright

format: $(VENV)/.installed-dev  ## Format and fix what can be fixed.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed-dev  ## The founding report's case beside transformers (about half an hour on two cores).
	$(BIN)/verax bench text --against transformers

clean:  ## Remove environments, caches and the demo's folder.
	rm -rf $(VENV) demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "verax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "could not create $(VENV): install Python's venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed
