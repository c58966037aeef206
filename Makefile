PYTHON ?= python3
VENV := .venv
HPO := $(VENV)/bin/hpo
STUDY := studies/digits/study.yaml
# One process more than cores: tests spend a quarter of their time waiting for time-outs or other processes.
TESTERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
# Tests of the full suite wait more: for servers, clusters and disks.
WAITERS = $(shell $(PYTHON) -c "import os; print(2 * os.cpu_count())")

# With it, each of the several hundred test processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all lint reference docs docs-serve install clean

run: install
	$(HPO) run $(STUDY) --workers 4

# The tests for each change: SQLite databases only, no browser, no commands that run whole studies.
test: install
	$(VENV)/bin/python -m pytest -n $(TESTERS) --dist worksteal -m "not full"

# The other tests: long ones, PostgreSQL and MariaDB, storms, the browser, the commands in the docs, the studies.
test-all: install
	$(VENV)/bin/python -m pytest -n $(WAITERS) --dist worksteal -m full

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Generates the pages of docs/reference/ from the code; commit the changes.
reference: install
	$(VENV)/bin/python docs/make_reference.py

# Warnings are errors: a dead link or anchor, a page that is in no menu. --quiet would hide them from --strict.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

install: $(VENV)/.installed

# pip would compile 28,000 modules on one core; the few that are used are compiled when they are imported.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) site studies/*/runs
