# Every target makes .venv when it is missing and reuses it when it is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.current
# The Python that a target runs, and its version: empty where it does not run.
USED := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
VERSION := $(shell $(USED) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
LOCK := $(if $(filter 3.10,$(VERSION)),constraints-3.10.txt,constraints.txt)
PIP := -m pip install --quiet --disable-pip-version-check
# Runs a command as on a stranger's machine: of its variables, only those that say how the network is reached (lab/places/ground.py).
REACH := SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy
CLEAN = env -i HOME="$$HOME" PATH="$$PATH" $(foreach each,$(REACH),$${$(each):+$(each)="$$$(each)"})
# and pip there, whatever a file of this machine says
OUTSIDE = $(CLEAN) PIP_CONFIG_FILE=/dev/null
COMMA := ,
PEERS := $(VENV)/.peers
# A worker more than there are cores, since tests that wait for links or patience leave theirs idle: the files of these are for one
# worker (tests/conftest.py). A file on one worker, in the order of the names, lest the longest files, which have few tests, come
# last; ranks and workers have one thread each. Bytecode is kept wherever the machine says otherwise: processes of tests would
# compile the library anew.
WORKERS = $(shell $(BIN)/python -c "import os; print(os.cpu_count() + 1)")
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The Tritons that supported torches bring: the one of constraints.txt first, then those that are tested beside it.
PINNED_TRITON := $(shell sed -n 's/^triton==\([^ ;]*\).*/\1/p' constraints.txt)
OTHER_TRITONS := $(filter-out $(PINNED_TRITON),3.6.0 3.7.1 3.9.0)
TRITONS := $(PINNED_TRITON) $(OTHER_TRITONS)

# The torch of constraints.txt, which `make lock` takes, and each that `make test-torch` runs under, with its Python: the lowest supported, one between, the pinned one, the newest.
TORCH := 2.13.0
TORCHES := 2.10.0-3.10 2.12.1-3.12 $(TORCH)-3.10 newest-3.12
# The package whose source is the text of a run that names none.
TEXT := $(shell sed -n 's/^\(sympy==[^ ;]*\).*/\1/p' constraints.txt)
# The layer with every router against float64, two micro-batches in flight, compilation, FSDP2 and the trainer on two ranks, transformers, the codecs.
SMOKE := tests/test_layer.py tests/test_in_flight.py tests/routing/test_injection.py tests/kernels/test_codecs.py tests/test_compile.py tests/test_fsdp_outputs.py \
	tests/test_parallel.py tests/train/test_on_two_ranks.py tests/train/test_shards.py tests/test_deprecations.py tests/transformers/test_backend.py

.PHONY: help setup whole-suite lock demo test test-ids test-random test-all test-triton test-torch test-peers lint bench bench-all chaos fuzz soak docs site dist places test-newest clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

# One line about the Python before pip speaks.
NAME_ONE := name one, as in PYTHON=python3.12 make setup
define suited
@case "$(VERSION)" in \
	3.11|3.12|3.13|3.14) ;; \
	3.10) echo "$(USED) is Python 3.10: transformers and what needs it are left out; for all: rm -r $(VENV), PYTHON=python3.12 make setup" ;; \
	"") echo "$(USED) does not run, and Moesaic needs Python 3.11 to 3.14 (3.10: without transformers): $(NAME_ONE)"; exit 1 ;; \
	*) echo "$(USED) is Python $(VERSION), and Moesaic needs 3.11 to 3.14 (3.10: without transformers): $(NAME_ONE)"; exit 1 ;; \
esac
endef

# An environment with the newest pip, since the one that Python 3.11 brings takes a minute more to choose versions.
define environment
$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
$(BIN)/python $(PIP) --upgrade pip
endef

# What the demo runs; a set-up of everything holds it.
$(DEMO): pyproject.toml $(LOCK)
	$(suited)
	$(environment)
	$(BIN)/python $(PIP) -c $(LOCK) -e ".[train]"
	touch $@

$(STAMP): pyproject.toml lab/pyproject.toml $(LOCK)
	$(suited)
	$(environment)
	$(BIN)/python $(PIP) -c $(LOCK) -e ".[dev]" -e "./lab[measure,vision]"
	touch $(DEMO) $@

$(PEERS): $(STAMP)
	$(BIN)/python $(PIP) -c $(LOCK) -e ".[dev]" -e "./lab[peers,vision]" \
		|| echo "DeepSpeed could not be installed: the benchmarks leave it out and say so"
	touch $@

whole-suite:
	@test "$(VERSION)" != 3.10 || { echo "$(USED) is Python 3.10, and the tests need 3.11, as transformers does: rm -r $(VENV), PYTHON=python3.12 make test; or make test-torch-$(TORCH)-3.10"; exit 1; }

# Resolves with the default index and no setting of this machine; keeps what stands where it can. `make lock UPGRADE=--upgrade` takes
# the newest, `UPGRADE="--upgrade-package rich"` one. DeepSpeed has no wheel. Our own packages are left out: pip refuses them there.
UPGRADE ?=
COMPILE = $(CLEAN) \
	uv pip compile - --quiet --no-config --universal --fork-strategy fewest --only-binary :all: --no-binary deepspeed \
	--no-header --no-annotate --no-emit-package moesaic --no-emit-package moesaic-lab $(UPGRADE)
ON_3.10 := ; python_version < '3.11'
lock:  ## constraints.txt and constraints-3.10.txt, the versions of every package on every system (needs uv)
	printf '%s\n' "torch==$(TORCH)" "-e .[ray,gpu,dev]" "-e ./lab[measure,fuzz,vision,peers]" \
		| $(COMPILE) --python-version 3.11 --output-file constraints.txt
	printf '%s\n' "torch==$(TORCH) $(ON_3.10)" "-e .[ray,gpu,dev] $(ON_3.10)" "-e ./lab[measure,vision] $(ON_3.10)" \
		| $(COMPILE) --python-version 3.10 --output-file constraints-3.10.txt

setup: $(STAMP)  ## make the virtual environment

demo: $(DEMO)  ## train a sparse and a dense GPT, compare them, sample, write the report
	$(BIN)/moesaic demo

test: whole-suite $(STAMP)  ## the tests: every pair of parameters, the first seeds
	$(PYTEST) -m "not slow and not random"

test-ids: whole-suite $(STAMP)  ## write tests/listed_tests.txt, the list of the tests that must not get lost
	$(BIN)/python tests/listed_tests.py

test-random: whole-suite $(STAMP) $(OTHER_TRITONS:%=build/triton/%/triton/__init__.py)  ## what make test leaves out and CI runs: the other combinations, thousands of random cases
	$(PYTEST) -m "random and not slow"

test-all: whole-suite $(STAMP)  ## the tests, the random and the slow ones too
	$(PYTEST)

test-triton: $(STAMP) $(TRITONS:%=build/triton/%/triton/__init__.py)  ## the kernels compiled for every GPU by each Triton that a supported torch brings, 5 minutes each
	for version in $(TRITONS); do \
		PYTHONPATH=build/triton/$$version TRITON_CACHE_DIR=build/triton/cache-$$version \
			$(BIN)/python -m pytest -q tests/kernels/triton/test_triton_compiled.py || exit 1; \
	done

build/triton/%/triton/__init__.py: | $(STAMP)
	$(BIN)/python $(PIP) --no-deps --upgrade --target build/triton/$* "triton==$*"

# Other training systems whose tests skip in .venv, in an environment of their own: torchtitan asks for an older package of data, and
# that one for older versions of what it needs.
build/peers/.current: pyproject.toml constraints.txt
	test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	grep -vE '^(datasets|dill|fsspec|huggingface-hub|multiprocess)==' constraints.txt > build/peers/constraints.txt
	build/peers/bin/python $(PIP) -c build/peers/constraints.txt -e ".[dev]" -e ./lab
	for peer in torchtitan==0.3.0 flash-linear-attention deepspeed "--no-deps megatron-core==0.16.1"; do \
		build/peers/bin/python $(PIP) -c build/peers/constraints.txt $$peer \
			|| echo "$$peer could not be installed: its tests are skipped"; \
	done
	touch $@

# DeepSpeed compiles at its first start; a compilation that was killed leaves a lock for which the next one waits without end.
test-peers: build/peers/.current  ## layers, recipes and checkpoints against torchtitan, DeepSpeed and Megatron-Core themselves
	rm -f build/peers/extensions/*/lock build/peers/extensions/*/*/lock
	OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(CURDIR)/build/peers/extensions" \
		build/peers/bin/python -m pytest -q -rs tests/peers tests/weights/test_against_torchtitan.py \
		tests/weights/test_against_megatron.py tests/test_recipes.py tests/test_moving_in.py

test-torch: $(TORCHES:%=test-torch-%)  ## the parts that torch carries, under every torch of TORCHES in turn

test-torch-%: build/torch/%/.current
	OMP_NUM_THREADS=1 build/torch/$*/bin/python -m pytest -m "not slow and not random" \
		$(if $(filter %-3.10,$*),$(filter-out tests/transformers/%,$(SMOKE)),$(SMOKE))

test-newest: test-torch-newest-3.12  ## what pip gives a stranger today: the same parts, and every family of transformers
	OMP_NUM_THREADS=1 build/torch/newest-3.12/bin/python -m pytest -m slow tests/transformers/test_backend.py

.PRECIOUS: build/torch/%/.current
# transformers 5.23 needs Python 3.11.
build/torch/%/.current: pyproject.toml
	@python$(lastword $(subst -, ,$*)) -c "" 2>/dev/null \
		|| { echo "python$(lastword $(subst -, ,$*)) does not run: install it, or put it on PATH"; exit 1; }
	python$(lastword $(subst -, ,$*)) -m venv build/torch/$*
	$(OUTSIDE) build/torch/$*/bin/python $(PIP) --upgrade --only-binary zfpy \
		-e ".[train,zfp$(if $(filter %-3.10,$*),,$(COMMA)transformers)]" pytest pytest-timeout hypothesis $(TEXT) \
		$(patsubst newest,torch,$(patsubst 2%,torch==2%,$(firstword $(subst -, ,$*))))
	touch $@

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

RESULTS := benchmarks/results
PICTURES := docs/images/bench

bench: $(PEERS)  ## the emulated cluster's benchmarks (needs the rights for network namespaces), 19 minutes
	$(BIN)/moesaic testbed info
	$(BIN)/moesaic bench comm --json $(RESULTS)/comm.json --picture $(PICTURES)/comm.svg
	$(BIN)/moesaic bench pays --json $(RESULTS)/pays.json
	$(BIN)/moesaic bench operators --json $(RESULTS)/operators.json
	$(BIN)/moesaic bench layer --json $(RESULTS)/layer.json --picture $(PICTURES)/layer.svg
	$(BIN)/moesaic bench train --json $(RESULTS)/train.json --picture $(PICTURES)/train.svg
	$(BIN)/python -m moesaic_lab.performance_page

bench-all: bench  ## every benchmark, the long trainings too
	$(BIN)/moesaic bench balance --json $(RESULTS)/balance.json --picture $(PICTURES)/balance.svg
	$(BIN)/moesaic bench headlines --json $(RESULTS)/headlines.json
	$(BIN)/moesaic bench small --json $(RESULTS)/small.json
	$(BIN)/moesaic bench step --json $(RESULTS)/step.json
	$(BIN)/python -m moesaic_lab.step.page
	$(BIN)/moesaic bench netmoe --json $(RESULTS)/netmoe.json --picture $(PICTURES)/netmoe.svg
	$(BIN)/moesaic bench gates_loss --json $(RESULTS)/gates_loss.json --picture $(PICTURES)/gates_loss.svg
	$(BIN)/moesaic bench relocate_train --json $(RESULTS)/relocate_train.json
	$(BIN)/moesaic bench placement_gaps --json $(RESULTS)/placement_gaps.json
	$(BIN)/moesaic bench extending --json $(RESULTS)/extending.json
	$(BIN)/moesaic bench front --json $(RESULTS)/front.json
	$(BIN)/moesaic bench moe_vs_dense --json $(RESULTS)/moe_vs_dense.json
	$(BIN)/moesaic bench tiny --json $(RESULTS)/tiny.json
	$(BIN)/moesaic bench vision_sweeps --json $(RESULTS)/vision_sweeps.json
	$(BIN)/moesaic bench codec_error --json $(RESULTS)/codec_error.json
	$(BIN)/moesaic bench schedules --json $(RESULTS)/schedules.json
	$(BIN)/moesaic bench local_copies --json $(RESULTS)/local_copies.json
	$(BIN)/moesaic bench simulator --json $(RESULTS)/simulator.json
	$(BIN)/moesaic bench collectives --json $(RESULTS)/collectives.json
	$(BIN)/moesaic bench model --json $(RESULTS)/model.json --picture $(PICTURES)/model.svg
	$(BIN)/moesaic bench device --json $(RESULTS)/device_cpu.json
	$(BIN)/moesaic bench device --part operations --json $(RESULTS)/kernels_cpu.json --picture $(PICTURES)/kernels_cpu.svg
	$(BIN)/moesaic reproduce all --json $(RESULTS)/reproduce.json
	$(BIN)/moesaic bench codec_convergence --json $(RESULTS)/codec_convergence.json
	$(BIN)/moesaic bench check --json $(RESULTS)/check.json
	$(BIN)/moesaic bench certificates --json $(RESULTS)/certificates.json --page docs/certificates.md
	$(BIN)/moesaic bench hf --json $(RESULTS)/hf.json
	$(BIN)/moesaic bench house --json $(RESULTS)/house.json
	$(BIN)/python -m moesaic_lab.performance_page

chaos: $(STAMP)  ## 200 faults over runs on an emulated cluster, half an hour
	$(BIN)/moesaic chaos --json $(RESULTS)/chaos.json

fuzz: $(STAMP)  ## 100,000 odd inputs for every reader and every command line, half an hour
	$(BIN)/python $(PIP) -c $(LOCK) -e "./lab[fuzz]"
	$(BIN)/moesaic fuzz --json $(RESULTS)/fuzz.json

soak: $(STAMP)  ## half an hour of changing plans on four processes: memory, descriptors, threads
	$(BIN)/moesaic soak --json $(RESULTS)/soak.json

docs: $(STAMP)  ## what pages say of the committed results, and the pictures
	$(BIN)/python -m moesaic_lab.papers_page
	$(BIN)/python -m moesaic_lab.performance_page
	$(BIN)/python -m moesaic_lab.timeline_picture
	$(BIN)/python -m moesaic_lab.rooms_picture
	$(BIN)/python -m moesaic_lab.step.page

site: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict

dist:  ## both packages, in dist: built, checked, installed from the public index alone in an empty environment, where commands and README's first block run
	$(PYTHON) -m venv --clear build/publish
	$(OUTSIDE) build/publish/bin/python $(PIP) --upgrade pip build twine
	rm -rf dist
	for each in . lab; do $(OUTSIDE) build/publish/bin/python -m build --outdir dist $$each || exit 1; done
	test "$$(ls dist/moesaic-*.whl dist/moesaic-*.tar.gz dist/moesaic_lab-*.whl dist/moesaic_lab-*.tar.gz | wc -l)" = 4
	build/publish/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear build/empty
	$(OUTSIDE) build/empty/bin/python $(PIP) --upgrade pip
	$(OUTSIDE) build/empty/bin/python $(PIP) dist/moesaic-*.tar.gz dist/moesaic_lab-*.tar.gz
	cd build/empty && bin/moesaic testbed --help
	$(OUTSIDE) build/empty/bin/python $(PIP) --force-reinstall --no-deps dist/*.whl
	$(OUTSIDE) build/empty/bin/python $(PIP) "$$(echo dist/moesaic-*.whl)[transformers]"
	sed -n '/^```python/,/^```$$/p; /^```$$/q' README.md | sed '/^```/d' > build/empty/readme.py
	cd build/empty && bin/moesaic plan --model demo --cluster 25gbe && bin/python readme.py

PLACES ?=
places:  ## the smoke test where strangers are, in every place or in PLACES="resolution debian12": a table in build/places
	cd lab && $(PYTHON) -m places $(PLACES)

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
