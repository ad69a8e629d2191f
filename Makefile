# From a bare machine: `make demo` (builds the CPU stack, runs its image, prints a verdict) and `make test`.
# Everything that a target needs it makes: Python environment, engine, base, images, models.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ENV := $(VENV)/.made
# unit tests mostly wait (for servers of their own, for a clock): more of them at once than there are cores
UNIT := -n 4 --dist worksteal tests/unit

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

env: $(ENV) ## the Python environment in .venv, from the locked requirements
$(ENV): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

engine: ## a Docker engine, when none answers (Debian and Ubuntu, as root)
	sh scripts/engine.sh

tools: ## programs that the tests need (Debian and Ubuntu, as root)
	sh scripts/tools.sh

lint: $(ENV) ## ruff and mypy in strict mode
	$(BIN)/ruff check .
	$(BIN)/mypy

test-unit: $(ENV) ## tests that need neither engine nor network
	$(BIN)/pytest $(UNIT)

# unit tests side by side, then in turn what shares the one engine; both run whole, whatever the first one finds
test: $(ENV) engine tools lint ## everything, for real: lint, unit, engine, registry, server in its container
	status=0; \
	$(BIN)/pytest --cov --cov-report= $(UNIT) || status=$$?; \
	$(BIN)/pytest --cov --cov-append --cov-report=term:skip-covered --ignore=tests/unit tests || status=$$?; \
	exit $$status

test-stack: $(ENV) engine ## build the whole CUDA 13 stack and look into it (10 GB, long)
	$(BIN)/pytest tests/stack -m stack

test-endurance: $(ENV) engine ## 50 lives of the real server (ENDURANCE_CYCLES=N): nothing may be left
	$(BIN)/pytest tests/endurance -m endurance -s

bench: $(ENV) engine ## our own speed, side by side with plain tools
	$(BIN)/python -m tests.perf.bench

bench-fresh: $(ENV) engine tools ## builds on an empty engine, beside bake with a registry cache (root; about 15 minutes)
	$(BIN)/python -m tests.perf.fresh

demo-model: $(ENV) engine ## the tiny models of the demo, made inside the image
	sh scripts/demo.sh model

demo: $(ENV) engine ## build the CPU stack, run its image, benchmark EAGLE-3 against the baseline
	sh scripts/demo.sh

clean: ## what builds and demos wrote into the checkout; images stay
	rm -rf .buildctl results .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

.PHONY: help env engine tools lint test-unit test test-stack test-endurance bench bench-fresh demo-model demo clean
