# Each target makes the virtual environment it needs. Nothing is installed outside of this folder. The work is done by
# scripts/make.py, which does it without make too; any Python runs that, and it finds one that fits.
VENV ?= .venv
VENV_TEST ?= .venv-test
ARGS ?=
NATIVE ?=
MINUTES ?= 10
REAL_MODELS = smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma3-270m

export PYTHON NATIVE VENV VENV_TEST

ANY_PYTHON = $(shell for p in python3 python $(PYTHON) python3.13 python3.12 python3.11; do \
	$$p -c "from __future__ import annotations" 2>/dev/null && echo $$p && break; done)
RUN = $(or $(ANY_PYTHON),$(error no Python 3.11, 3.12 or 3.13 found; install one, or name it: PYTHON=/path/to/python3.12)) \
	scripts/make.py

.PHONY: help chat test test-real docs fuzz lint format types clean

help:
	@echo 'make chat       talk to a model and watch the guesses (ARGS="--temperature 0.7" passes options)'
	@echo 'make test       the test suite, with every extra installed (ARGS="-k ngram -n 0" passes options)'
	@echo 'make test-real  the tests on real models; fetches them first (2 GB)'
	@echo 'make docs       write docs/cli.md and docs/models.md anew'
	@echo 'make fuzz       random cases for every surface (MINUTES=10; ARGS="--only sessions" passes options)'
	@echo 'make lint       ruff: rules and formatting'
	@echo 'make format     let ruff rewrite what it can'
	@echo 'make types      mypy --strict'
	@echo 'make clean      remove the virtual environments and caches'
	@echo 'PYTHON=/path/to/python3.12 picks the interpreter. NATIVE=1 compiles the engine for this CPU, once.'

chat:
	@$(RUN) chat $(ARGS)

test:
	@$(RUN) test $(ARGS)

test-real:
	@$(RUN) dev localspec pull $(REAL_MODELS)
	@LOCALSPEC_TEST_MODELS="$$($(RUN) dev python -c 'from localspec.system.files import models_dir; print(models_dir())')" \
		$(RUN) dev python -m pytest -m real $(ARGS)

docs:
	@$(RUN) dev python -m scripts.make_docs $(ARGS)

fuzz:
	@$(RUN) dev python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

lint:
	@$(RUN) dev ruff check
	@$(RUN) dev ruff format --check

format:
	@$(RUN) dev ruff check --fix
	@$(RUN) dev ruff format

types:
	@$(RUN) dev mypy

clean:
	rm -rf $(VENV) $(VENV_TEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find localspec tests -name __pycache__ -type d -prune -exec rm -rf {} +
