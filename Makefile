# `make demo` sets up an environment, trains a small language model and has it generate text. `make
# test` sets it up and runs the tests; `make check` runs the linter, the type checker and the import
# contracts. `make docs` builds a site from docs/ in site/. `make test-all` runs the tests on every
# Python of this host, with the lowest and the newest torch; `make test-lowest`, with the lowest versions
# of all packages that pipeworker needs. `make soak` trains for half an hour under faults that a job
# recovers from; `make chaos` injects hundreds of faults; `make fuzz` draws jobs and faults from seeds;
# `make schedules` runs resume, recovery, replicas and torchrun under every schedule. `make papers` makes
# benchmarks/papers.md, in about 50 minutes; TABLES=throughput only that table.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# For test and test-all: which files; for test-all: versions such as 3.10 or 3.11.2, all if empty.
TESTS ?=
PYTHONS ?=
TORCHES ?= 2.13.0 2.15.0
VENV := .venv
BIN := $(VENV)/bin
# Tests wait at times, so run two processes more than there are cores, up to four.
PROCESSES := $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 2)); echo $$((n < 4 ? n : 4)))

# The lowest versions that setup.cfg allows. Kubernetes' package for tests needs newer ones.
LOWEST = $(shell sed -n '/^install_requires/,/^$$/s/^    \([a-z_]*\)>=\([0-9.]*\).*/\1==\2/p' setup.cfg)
MANIFESTS := tests/launcher/engines/test_engines_manifests.py

.PHONY: demo test test-all test-lowest check docs soak chaos fuzz schedules papers clean

demo: $(VENV)/.run
	run=runs/demo-$$(date +%Y%m%d-%H%M%S) && \
	$(BIN)/pipeworker launch --stages 4 --steps 100 --evaluate-every 25 --run-dir $$run examples/bytelm.py && \
	echo "generated:" && $(BIN)/python examples/bytelm.py $$run

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal $(TESTS)

test-all:
	$(PYTHON) tests/every_python.py --pythons "$(PYTHONS)" --torches "$(TORCHES)"

test-lowest:
	$(MAKE) VENV=.venvs/lowest .venvs/lowest/.test
	.venvs/lowest/bin/pip install --quiet --no-deps $(LOWEST)
	$(MAKE) VENV=.venvs/lowest TESTS="$(TESTS) --ignore $(MANIFESTS)" test

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs site

papers: $(VENV)/.run
	cd benchmarks && ../$(BIN)/python -m papers $(TABLES)

soak: $(VENV)/.test
	SOAK_SECONDS=1800 $(BIN)/python -m pytest --run-slow --cold --capture no tests/faults/test_soak.py

chaos: $(VENV)/.test
	CHAOS_FAULTS=220 $(BIN)/python -m pytest --run-slow --cold --capture no tests/faults/test_chaos.py

schedules: $(VENV)/.test
	SCHEDULES=all $(BIN)/python -m pytest --run-slow --numprocesses $(PROCESSES) tests/planning/test_schedules_suites.py

# A failure prints its seed: make fuzz FUZZ_SEED=17 FUZZ_CASES=1
FUZZ_CASES ?= 50
fuzz: $(VENV)/.test
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest --run-slow --capture no --verbose tests/faults/test_fuzz.py

# With test,loggers also the tests that log to wandb and MLflow, which take 10 s of CPU to install.
# With test,notebooks also the one with a real kernel of Jupyter, which takes 6 s of CPU to install.
# With test,ray also those on a Ray cluster, with test,torchdata those of its StatefulDataLoader, with
# test,transformers those of models of transformers, with test,examples the training of the networks in
# examples/papers. test-all and the nightly run have all of these.
EXTRAS ?= test

# torch is pinned to a version: a range would install a build with gigabytes of CUDA. pip would compile
# all of torch to bytecode, which takes longer than everything else; Python compiles each module when it
# is first imported. The pip that comes with an older Python takes twice as long to choose versions.
export PYTHONDONTWRITEBYTECODE =
INSTALL = test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	$(BIN)/pip install --quiet --upgrade pip; \
	$(BIN)/pip install --quiet --no-compile '$(TORCH)' --editable

$(VENV)/.run: setup.cfg pyproject.toml
	$(INSTALL) .
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml
	$(INSTALL) '.[$(EXTRAS)]'
	touch $(VENV)/.run $@

$(VENV)/.docs: setup.cfg pyproject.toml
	$(INSTALL) '.[docs]'
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) .venvs build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
