# `make demo` and `make test` need only python3 (3.11 or newer): they set up .venv themselves.

PYTHON  ?= python3
WORKERS ?= 2
BIN     := .venv/bin
STAMP   := .venv/.installed
# bytecode is kept: tests start processes that import the library
PYTEST   = env PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) --dist worksteal
CHANGED  = $(BIN)/python -m tests.changed
# packages whose models and loops are tested
TESTED   = accelerate lightning peft transformers

.DEFAULT_GOAL := help
.PHONY: help setup demo test check others static lint types contracts unit docs docs-snippets slow bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install pullback, its experiments and development tools

$(STAMP): pyproject.toml experiments/pyproject.toml constraints.txt
	@echo "==> creating .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "==> installing pullback, its experiments and development tools (a few minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]" -e ./experiments $(TESTED)
	@touch $@

demo: $(STAMP) ## run the demonstration; its figure is written to demo/
	@echo "==> running the demonstration"
	@$(BIN)/python -m pullback_experiments.demo

test: $(STAMP) ## everything a change must pass
	@$(MAKE) --no-print-directory -j2 --output-sync=target types others
	@echo "==> all checks passed"

check: lint contracts ## for daily work: what differs from origin/main, or from BASE=commit
	@echo "==> basedpyright, changed files"
	@$(CHANGED) sources $(BASE) | xargs -r $(BIN)/basedpyright
	@echo "==> pytest, tests of changed files"
	@$(CHANGED) tests $(BASE) | xargs -r $(PYTEST)

# types take one core for a minute: the tests begin on the other one
others: $(STAMP)
	@$(MAKE) --no-print-directory --output-sync=none lint contracts docs unit

static: types lint contracts docs ## everything but the tests

lint: $(STAMP) ## style, formatting and spelling
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> vague names"
	@$(BIN)/python -m tests.vague_names
	@echo "==> codespell"
	@$(BIN)/codespell

types: $(STAMP) ## static types
	@echo "==> basedpyright"
	@$(BIN)/basedpyright

contracts: $(STAMP) ## import direction between the stages, and no circles
	@echo "==> import-linter"
	@$(BIN)/lint-imports
	@echo "==> circles of imports"
	@$(BIN)/python -m tests.import_circles

unit: $(STAMP) ## tests, docstring examples, README and docs snippets
	@echo "==> pytest"
	@$(PYTEST)

docs: $(STAMP) ## the documentation, into site/; a broken link or anchor is an error
	@echo "==> mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-snippets: $(STAMP) ## only the README and docs snippets
	@echo "==> README and docs snippets"
	@$(BIN)/pytest -q tests/docs -m ""

slow: $(STAMP) ## the tests that take minutes
	@echo "==> pytest, slow tests"
	@$(PYTEST) -m slow

bench: $(STAMP) ## comparisons with other libraries
	@echo "==> installing the libraries compared with"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@echo "==> benchmarks"
	@$(BIN)/pullback bench exact
	@$(BIN)/pullback bench scale

format: $(STAMP) ## fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment, caches and outputs
	rm -rf .venv build dist experiments/dist site demo .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
