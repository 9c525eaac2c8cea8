# `make demo` and `make test` do all their own set-up: a virtual environment in .venv, once.
PYTHON  ?= python3
WORKERS ?= 2

BIN   := .venv/bin
STAMP := .venv/.installed
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# One thread per test worker: the workers, not the matrix library, share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full matrix lint format bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(STAMP) ## create .venv with gdngen and everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[dev,models]'
	touch $@

demo: $(STAMP) ## a Qwen3-Next layer of transformers, prefill and decode, through generated operators
	$(BIN)/python examples/qwen3_next.py

test: $(STAMP) ## the tests that every change runs
	$(PYTEST) -m "not full"

test-full: $(STAMP) ## every test, the long ones too
	$(PYTEST)

matrix: $(STAMP) ## presets under each version of Triton: the table of docs/versions.md (half an hour on 2 cores)
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/versions.py --table docs/versions.md

lint: $(STAMP) ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP) ## forward and decode times against fla-core (needs a GPU)
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/compare_fla.py

clean: ## remove what make and Python left behind (not .venv)
	rm -rf build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
