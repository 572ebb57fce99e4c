# Set-up is done once in .venv and done again when the pins in requirements.lock change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two processes of one thread each, since more would wait for each other on two cores; the tests of a file in one of them: what is
# trained once serves every test of its file.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-fast clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(READY) ## the main job on the embedded default; ARGS="..." are passed on
	$(BIN)/gdino-lab train $(ARGS)

test: $(READY) ## the tests, but for the few that take as long as a dozen others
	$(PYTEST) -m "not thorough" $(ARGS)

test-all: $(READY) ## every test
	$(PYTEST) $(ARGS)

test-fast: $(READY) ## the quick tests: no rank processes
	$(PYTEST) -m "not slow" $(ARGS)

clean: ## remove the environment; outputs/ stays
	rm -rf .venv

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else "gdino-lab needs Python 3.11 to 3.13; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
