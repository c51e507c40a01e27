# Every target makes .venv when it is missing and reuses it when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current
PEERS := $(VENV)/.peers

.PHONY: help setup demo test test-all lint bench bench-all docs site clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e ./lab
	touch $@

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e "./lab[peers]" \
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
	$(BIN)/python -m moesaic_lab.performance_page

bench-all: bench  ## every benchmark, the long trainings too
	$(BIN)/moesaic bench balance --json $(RESULTS)/balance.json --picture $(PICTURES)/balance.svg
	$(BIN)/python -m moesaic_lab.netmoe --json $(RESULTS)/netmoe.json --picture $(PICTURES)/netmoe.svg
	$(BIN)/python -m moesaic_lab.gates_loss --json $(RESULTS)/gates_loss.json --picture $(PICTURES)/gates_loss.svg
	$(BIN)/python -m moesaic_lab.relocate_train --json $(RESULTS)/relocate_train.json
	$(BIN)/python -m moesaic_lab.replicated_weights --json $(RESULTS)/replicated_weights.json
	$(BIN)/python -m moesaic_lab.placement_gaps --json $(RESULTS)/placement_gaps.json
	$(BIN)/python -m moesaic_lab.extending --json $(RESULTS)/extending.json
	$(BIN)/python -m moesaic_lab.token_budget --json $(RESULTS)/token_budget.json --picture $(PICTURES)/token_budget.svg
	$(BIN)/python -m moesaic_lab.moe_vs_dense --json $(RESULTS)/moe_vs_dense.json
	$(BIN)/python -m moesaic_lab.codec_error --json $(RESULTS)/codec_error.json
	$(BIN)/python -m moesaic_lab.schedules --json $(RESULTS)/schedules.json
	$(BIN)/python -m moesaic_lab.transports --json $(RESULTS)/transports.json
	$(BIN)/python -m moesaic_lab.simulator --json $(RESULTS)/simulator.json
	$(BIN)/moesaic bench model --json $(RESULTS)/model.json --picture $(PICTURES)/model.svg
	$(BIN)/moesaic bench device --json $(RESULTS)/device_cpu.json
	$(BIN)/moesaic bench kernels --json $(RESULTS)/kernels_cpu.json --picture $(PICTURES)/kernels_cpu.svg
	$(BIN)/moesaic reproduce all --json $(RESULTS)/reproduce.json
	$(BIN)/python -m moesaic_lab.plan_table_replay --json $(RESULTS)/plan_table.json
	$(BIN)/python -m moesaic_lab.topology_gate --json $(RESULTS)/topology_gate.json
	$(BIN)/python -m moesaic_lab.same_curves --json $(RESULTS)/same_curves.json
	$(BIN)/python -m moesaic_lab.codec_convergence --json $(RESULTS)/codec_convergence.json
	$(BIN)/python -m moesaic_lab.check > $(RESULTS)/check.json
	$(BIN)/python -m moesaic_lab.performance_page

docs: $(STAMP)  ## docs/performance.md from the committed results
	$(BIN)/python -m moesaic_lab.performance_page

site: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
