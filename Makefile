# Every target makes .venv when it is missing and reuses it when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current

.PHONY: help setup demo test test-all lint bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

setup: $(STAMP)  ## make the virtual environment

demo: $(STAMP)  ## train a sparse and a dense GPT, compare them, sample, write the report
	$(BIN)/moesaic demo

test: $(STAMP)  ## the tests
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP)  ## the tests, the slow ones too
	$(BIN)/python -m pytest

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## every benchmark, results into benchmarks/results
	$(BIN)/python benchmarks/moe_vs_dense.py --json benchmarks/results/moe_vs_dense.json
	$(BIN)/python benchmarks/codec_error.py --json benchmarks/results/codec_error.json
	$(BIN)/python benchmarks/schedules.py --json benchmarks/results/schedules.json
	$(BIN)/python benchmarks/same_curves.py --json benchmarks/results/same_curves.json
	$(BIN)/python benchmarks/codec_convergence.py --json benchmarks/results/codec_convergence.json
	$(BIN)/moesaic check --json > benchmarks/results/check.json
	$(BIN)/python benchmarks/performance_page.py

docs: $(STAMP)  ## docs/performance.md from the committed results
	$(BIN)/python benchmarks/performance_page.py

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
