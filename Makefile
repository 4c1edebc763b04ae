# Two commands: `make demo` sets up and trains a small language model, `make test` sets up and tests.
# `make docs` makes a site of docs/, in site/. `make soak` trains for half an hour among faults that
# end nothing, `make chaos` among hundreds that do.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Tests wait more than they compute: two processes more than there are cores, up to four.
PROCESSES := $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 2)); echo $$((n < 4 ? n : 4)))

.PHONY: demo test check docs soak chaos clean

demo: $(VENV)/.run
	$(BIN)/pipeworker launch --stages 4 --steps 60 examples/bytelm.py

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs site

soak: $(VENV)/.test
	SOAK_SECONDS=1800 $(BIN)/python -m pytest --cold --capture no tests/test_soak.py

chaos: $(VENV)/.test
	CHAOS_FAULTS=220 $(BIN)/python -m pytest --cold --capture no tests/test_chaos.py

# torch is asked for by its version: a range would bring a build with gigabytes of CUDA. Whatever is
# imported is compiled then, once; pip would compile all of torch, which takes longer than the rest.
export PYTHONDONTWRITEBYTECODE =
INSTALL = test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	$(BIN)/pip install --quiet --no-compile $(TORCH) --editable

$(VENV)/.run: setup.cfg pyproject.toml
	$(INSTALL) .
	touch $@

$(VENV)/.test: setup.cfg pyproject.toml
	$(INSTALL) '.[test]'
	touch $(VENV)/.run $@

$(VENV)/.docs: setup.cfg pyproject.toml
	$(INSTALL) '.[docs]'
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
