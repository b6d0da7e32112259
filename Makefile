# Everything starts here: `make demo`, `make test`, `make check`. Needs Python 3.11 or newer and make.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test check coverage faults bench

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.runtime ## Run the example product on http://127.0.0.1:8000/ (PORT, DATABASE_URL, DEMO_PASSWORD)
	@PORT=$(PORT) exec $(BIN)/python manage.py demo

setup: $(VENV)/.dev ## Install what tests and checks need

test: $(VENV)/.dev ## Run the tests on SQLite and PostgreSQL (ARGS="tests/x -k y", DB=sqlite|postgres)
	@$(BIN)/python -m tests.run $(if $(DB),--database $(DB)) $(ARGS)

check: $(VENV)/.dev ## Lint, types, import rules, Django's checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python manage.py check --fail-level WARNING
	$(BIN)/python manage.py makemigrations --check --dry-run

coverage: $(VENV)/.dev ## Show that the tests reach every branch of aguiapp.protocol
	$(BIN)/python -m pytest -q tests/protocol tests/conformance -m "not node" \
		--cov=aguiapp.protocol --cov-branch --cov-report=term:skip-covered --cov-fail-under=100

faults: $(VENV)/.dev ## Break servers, databases and connections for an hour (FAULTS_SEED, ARGS, DB)
	@FAULTS=long $(BIN)/python -m tests.run $(if $(DB),--database $(DB)) tests/faults $(ARGS)

bench: $(VENV)/.dev ## Measure throughput and latency (ARGS)
	$(BIN)/python -m bench $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "Installing aguiapp into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install -qq --editable .
	@touch $@

# Dependency groups need pip 25.1.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the development tools (another minute) ..."
	@$(BIN)/python -m pip install -qq --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install -qq --group dev --editable ".[redis,binary,remote]"
	@touch $@
