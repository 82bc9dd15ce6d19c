# Every target sets up what it needs: an environment of its own in .venv, made from pyproject.toml.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 test` chooses another.
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11,\
	$(shell $(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& echo $(python))))

VENV := .venv
RUN := $(VENV)/bin/python

# The floors that pyproject.toml names, so that each stands in one place.
OLDEST_TORCH := $(shell sed -n 's/^ *"torch>=\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
OLDEST_RAY := $(shell sed -n 's/^ *"ray\[data\]>=\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
OLDEST_VENV := .venv-ray-$(OLDEST_RAY)
PRE_VENV := .venv-ray-pre

BENCH_OUT := build/bench
BENCH_SHORT := tiny jpeg null ragged tabular tax
BENCH_ALL := $(patsubst benchmarks/benchmark_%.py,%,$(sort $(wildcard benchmarks/benchmark_*.py)))

# Pages whose English `make check` looks at, with that of dpex/.
PROSE := $(filter-out %.zh-CN.md,$(wildcard *.md docs/*.md benchmarks/*.md */README.md))

DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
# What `make bench-against` compares: a revision and the cases.
REV ?= HEAD
AGAINST ?=
SOAK_ARGS ?=
# How many schedules `make simulate` plays, the seed that it replays on which carrier, whether it
# plants bugs.
COUNT ?= 1000000
SEED ?=
CARRIER ?= cluster
MUTATIONS ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-demo ## Train a small CNN with torch, dpex, and a Ray cluster that loses a node (DEMO_ARGS=--quick)
	$(RUN) examples/demo.py $(DEMO_ARGS)

# Two at a time: most tests wait for processes that start or are found to be dead.
IN_PARALLEL := --numprocesses 2 --dist worksteal

# If PYTHONDONTWRITEBYTECODE is set, each of the thousand processes of the tests would compile dpex.
COMPILE := $(RUN) -m compileall -q dpex tests/programs

.PHONY: test
test: check ## check, then the tests (TEST_ARGS="-k parity")
	$(COMPILE)
	$(RUN) -m pytest -m "not extended" $(IN_PARALLEL) --durations=15 $(TEST_ARGS)

.PHONY: simulate
simulate: $(VENV)/.installed-test ## Search races of the protocol (COUNT=1000000; SEED=7 replays; MUTATIONS=1)
	PYTHONPATH=tests $(RUN) -m simulation --count $(COUNT) $(if $(SEED),--seed $(SEED) --carrier $(CARRIER)) \
		$(if $(MUTATIONS),--mutations)

.PHONY: simulate-scale
simulate-scale: $(VENV)/.installed-test ## Simulate 64 and 256 nodes with measured times, for docs/scaling.md
	PYTHONPATH=tests $(RUN) -m simulation.scale
	$(RUN) -m benchmarks.report

.PHONY: test-extended
test-extended: $(VENV)/.installed-test ## The examples, and clusters whose nodes and links die
	$(COMPILE)
	$(RUN) -m pytest -m "extended and not (dist or long or sabotage)" $(IN_PARALLEL) \
		--durations=30 $(TEST_ARGS)

.PHONY: test-actors
test-actors: $(VENV)/.installed-test ## The tests with worker processes in actors, as with a Ray without tasks
	DPEX_WORKERS_IN_ACTORS=1 $(RUN) -m pytest -m "not extended" $(IN_PARALLEL) \
		--durations=15 $(TEST_ARGS)

.PHONY: test-long
test-long: $(VENV)/.installed-test ## Tests of a minute or more, such as of a cut link (20 minutes)
	$(RUN) -m pytest -m long $(IN_PARALLEL) --durations=0 $(TEST_ARGS)

.PHONY: test-sabotage
test-sabotage: $(VENV)/.installed-test ## Hide and spoil each private name of Ray's in turn (an hour)
	$(RUN) -m pytest -m sabotage $(IN_PARALLEL) tests/compat/test_sabotage.py $(TEST_ARGS)

.PHONY: notebooks
notebooks: $(VENV)/.installed-test ## Run the notebooks from top to bottom, and back
	$(RUN) -m pytest tests/test_notebooks.py $(TEST_ARGS)

.PHONY: lab
lab: $(VENV)/.installed-lab ## Open the notebooks in JupyterLab
	$(VENV)/bin/jupyter lab notebooks

.PHONY: check
check: $(VENV)/.installed-dev ## ruff, mypy --strict, the prose, and whether the reports are those of the records
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) .ci/prose dpex tests benchmarks examples $(PROSE)
	$(RUN) -m benchmarks.report --check

.PHONY: format
format: $(VENV)/.installed-dev ## Let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: docs
docs: $(VENV)/.installed-docs ## Build the documentation's site in build/site, and check it
	$(RUN) -m sphinx --fresh-env --fail-on-warning --quiet --conf-dir docs/site \
		--doctree-dir build/doctrees . build/site

.PHONY: bench
bench: BENCH_ARGS = --rounds 5
bench: $(addprefix bench-,$(BENCH_SHORT)) ## The short benchmarks, dpex against torch (< 10 minutes)
	@$(RUN) -m benchmarks.harness $(patsubst %,$(BENCH_OUT)/%.json,$(BENCH_SHORT))

.PHONY: bench-all
bench-all: BENCH_OUT = benchmarks/results
bench-all: BENCH_ARGS = --all-peers
bench-all: $(addprefix bench-,$(BENCH_ALL)) ## Every benchmark and peer, then the report in docs/ (an hour and a half)
	$(RUN) -m benchmarks.report

.PHONY: bench-against
bench-against: $(VENV)/.installed-bench ## Compare with another revision (REV=HEAD~1 AGAINST="tiny cold")
	$(RUN) -m benchmarks.against $(REV) $(if $(AGAINST),--cases $(AGAINST)) \
		--out $(BENCH_OUT)/against.json $(BENCH_ARGS)

# One case: `make bench-jpeg`. Never two at once, also under `make -j`.
.PHONY: $(addprefix bench-,$(BENCH_ALL))
$(addprefix bench-,$(BENCH_ALL)): bench-%: $(VENV)/.installed-bench
	$(RUN) -m benchmarks.benchmark_$* --out $(BENCH_OUT)/$*.json $(BENCH_ARGS)

# A record of times for the simulation, and not of a comparison.
bench-service_times: BENCH_OUT = benchmarks/results/simulated

.PHONY: scale
scale: BENCH_OUT = benchmarks/results
scale: BENCH_ARGS = --rounds 1
scale: bench-scale ## 1 to 8 nodes, then the tables in docs/scaling.md (half an hour)
	$(RUN) -m benchmarks.report

.PHONY: soak
soak: $(VENV)/.installed-test $(VENV)/.installed-bench ## Faults of every kind, each many times (hours; SOAK_ARGS="--runs 1")
	$(RUN) tests/programs/soak.py --out benchmarks/results/faults/soak.json $(SOAK_ARGS)
	$(RUN) -m benchmarks.report

.PHONY: endurance
endurance: $(VENV)/.installed-test $(VENV)/.installed-bench ## Whether anything grows in 300 epochs, and in 100,000 batches
	$(RUN) tests/programs/endurance.py --out benchmarks/results/faults/endurance.json
	$(RUN) -m benchmarks.report

.PHONY: test-oldest
test-oldest: $(OLDEST_VENV)/.installed-test ## The tests with the oldest Ray and torch that dpex supports
	$(OLDEST_VENV)/bin/python -m pytest -m "not extended" $(IN_PARALLEL) $(TEST_ARGS)

# Later versions of Ray Data run all tasks in actors if the variable is 1. dpex's pipeline actor sets
# it to 0 for itself; all other processes of the tests keep 1.
define NAME_VERSIONS
from importlib.metadata import version
from packaging.version import Version
for name in ("ray", "torch"):
    found = Version(version(name))
    print(name, found, "" if found.is_prerelease else "(no pre-release: the newest release)")
endef
export NAME_VERSIONS

.PHONY: test-pre
test-pre: $(PRE_VENV)/.installed-test ## The tests with pre-releases of Ray and torch, where there are any
	@$(PRE_VENV)/bin/python -c "$$NAME_VERSIONS"
	RAY_DATA_ACTOR_ONLY_BACKEND=1 $(PRE_VENV)/bin/python -m pytest -m "not extended" $(IN_PARALLEL) $(TEST_ARGS)

.PHONY: dist
dist: $(VENV)/.installed-release ## Build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(RUN) -m build --no-isolation
	$(RUN) -m twine check --strict dist/*

.PHONY: test-dist
test-dist: $(VENV)/.installed-test ## Install both, with all they need, for every Python on the PATH
	$(RUN) -m pytest -m dist $(TEST_ARGS)

.PHONY: clean
clean: ## Remove caches and build outputs; the environments stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dpex tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean ## Remove the environments too
	rm -rf .venv .venv-ray-*

.NOTPARALLEL:

# --- set-up -------------------------------------------------------------------------------------

# pip knows dependency groups since 25.1.
NEW_PIP := --quiet 'pip>=25.1'

# One stamp per dependency group. All groups share one environment, so what is there already is
# kept, and torch and torchvision are resolved together.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the '$*' group into $(VENV); torch and Ray make this take minutes the first time."
	$(RUN) -m pip install $(NEW_PIP)
	$(RUN) -m pip install --editable . --group $*
	@touch $@

# Only Ray and torch are held back, and with torch what depends on it.
$(OLDEST_VENV)/.installed-test: pyproject.toml | $(OLDEST_VENV)/bin/python
	$(OLDEST_VENV)/bin/python -m pip install $(NEW_PIP)
	$(OLDEST_VENV)/bin/python -m pip install --editable . --group test \
		'ray[data]==$(OLDEST_RAY).*' 'torch==$(OLDEST_TORCH).*'
	@touch $@

# `--pre` in the second command alone: only Ray, torch and torchvision may be pre-releases.
$(PRE_VENV)/.installed-test: pyproject.toml | $(PRE_VENV)/bin/python
	$(PRE_VENV)/bin/python -m pip install $(NEW_PIP)
	$(PRE_VENV)/bin/python -m pip install --editable . --group test
	$(PRE_VENV)/bin/python -m pip install --pre --upgrade 'ray[client,data]' torch torchvision
	@touch $@

$(VENV)/bin/python $(OLDEST_VENV)/bin/python $(PRE_VENV)/bin/python:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then \
		echo "dpex needs Python 3.11 or newer; 'make PYTHON=/path/to/python3.12 ...' names one." >&2; \
		echo "Found: $$("$(or $(PYTHON),python3)" --version 2>&1)" >&2; exit 1; \
	fi
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) lacks the venv module (on Debian and Ubuntu: install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)
