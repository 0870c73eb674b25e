# Each target makes the virtual environment it needs. Nothing is installed outside of this folder.
VENV ?= .venv
VENV_TEST ?= .venv-test
ARGS ?=
NATIVE ?=
MINUTES ?= 10
REAL_MODELS = smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma3-270m

export PYTHON NATIVE

.PHONY: help chat test test-real docs fuzz lint format types clean

help:
	@echo 'make chat       talk to a model and watch the guesses (ARGS="--temperature 0.7" passes options)'
	@echo 'make test       the test suite, with every extra installed (ARGS="-k ngram -n 0" passes options)'
	@echo 'make test-real  the tests on real models; fetches them first (2 GB)'
	@echo 'make docs       write docs/cli.md and docs/models.md anew'
	@echo 'make fuzz       random cases for every surface (MINUTES=10; ARGS="--only requests" passes options)'
	@echo 'make lint       ruff: rules and formatting'
	@echo 'make format     let ruff rewrite what it can'
	@echo 'make types      mypy --strict'
	@echo 'make clean      remove the virtual environments and caches'
	@echo 'PYTHON=/path/to/python3.12 picks the interpreter. NATIVE=1 compiles the engine for this CPU, once.'

chat:
	@scripts/venv $(VENV)
	@$(VENV)/bin/localspec chat $(ARGS)

test:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

test-real:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/localspec pull $(REAL_MODELS)
	@LOCALSPEC_TEST_MODELS="$$($(VENV_TEST)/bin/python -c 'from localspec.system.home import models_dir; print(models_dir())')" \
		$(VENV_TEST)/bin/python -m pytest -m real $(ARGS)

docs:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/python -m scripts.make_docs $(ARGS)

fuzz:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

lint:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/ruff check
	@$(VENV_TEST)/bin/ruff format --check

format:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/ruff check --fix
	@$(VENV_TEST)/bin/ruff format

types:
	@scripts/venv $(VENV_TEST) dev all
	@$(VENV_TEST)/bin/mypy

clean:
	rm -rf $(VENV) $(VENV_TEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
	find localspec tests -name __pycache__ -type d -prune -exec rm -rf {} +
