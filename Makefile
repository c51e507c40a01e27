# Every target makes .venv when it is missing and reuses it when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current
PEERS := $(VENV)/.peers

.PHONY: help setup demo test test-all lint bench bench-all docs site clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,peers]" \
		|| echo "DeepSpeed could not be installed: the benchmarks leave it out and say so"
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

RESULTS := benchmarks/results
PICTURES := docs/images/bench

bench: $(PEERS)  ## the emulated cluster's benchmarks (needs the rights for network namespaces), 19 minutes
	$(BIN)/moesaic testbed info
	$(BIN)/moesaic bench comm --json $(RESULTS)/comm.json --picture $(PICTURES)/comm.svg
	$(BIN)/moesaic bench layer --json $(RESULTS)/layer.json --picture $(PICTURES)/layer.svg
	$(BIN)/moesaic bench train --json $(RESULTS)/train.json --picture $(PICTURES)/train.svg
	$(BIN)/python benchmarks/performance_page.py

bench-all: bench  ## every benchmark, the long trainings too
	$(BIN)/moesaic bench balance --json $(RESULTS)/balance.json --picture $(PICTURES)/balance.svg
	$(BIN)/python benchmarks/netmoe.py --json $(RESULTS)/netmoe.json --picture $(PICTURES)/netmoe.svg
	$(BIN)/python benchmarks/gates_loss.py --json $(RESULTS)/gates_loss.json --picture $(PICTURES)/gates_loss.svg
	$(BIN)/python benchmarks/relocate_train.py --json $(RESULTS)/relocate_train.json
	$(BIN)/python benchmarks/lent_weights.py --json $(RESULTS)/lent_weights.json
	$(BIN)/python benchmarks/placement_gaps.py --json $(RESULTS)/placement_gaps.json
	$(BIN)/python benchmarks/token_budget.py --json $(RESULTS)/token_budget.json --picture $(PICTURES)/token_budget.svg
	$(BIN)/python benchmarks/moe_vs_dense.py --json $(RESULTS)/moe_vs_dense.json
	$(BIN)/python benchmarks/codec_error.py --json $(RESULTS)/codec_error.json
	$(BIN)/python benchmarks/schedules.py --json $(RESULTS)/schedules.json
	$(BIN)/python benchmarks/wires.py --json $(RESULTS)/wires.json
	$(BIN)/python benchmarks/simulator.py --json $(RESULTS)/simulator.json
	$(BIN)/moesaic bench model --json $(RESULTS)/model.json --picture $(PICTURES)/model.svg
	$(BIN)/moesaic bench device --json $(RESULTS)/device_cpu.json
	$(BIN)/moesaic bench kernels --json $(RESULTS)/kernels_cpu.json --picture $(PICTURES)/kernels_cpu.svg
	$(BIN)/moesaic reproduce all --json $(RESULTS)/reproduce.json
	$(BIN)/python benchmarks/plan_table_replay.py --json $(RESULTS)/plan_table.json
	$(BIN)/python benchmarks/topology_gate.py --json $(RESULTS)/topology_gate.json
	$(BIN)/python benchmarks/same_curves.py --json $(RESULTS)/same_curves.json
	$(BIN)/python benchmarks/codec_convergence.py --json $(RESULTS)/codec_convergence.json
	$(BIN)/moesaic check --json > $(RESULTS)/check.json
	$(BIN)/python benchmarks/performance_page.py

docs: $(STAMP)  ## docs/performance.md from the committed results
	$(BIN)/python benchmarks/performance_page.py

site: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
