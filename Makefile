PYTHON ?= python3
VENV := .venv
HPO := $(VENV)/bin/hpo
STUDY := studies/digits/study.yaml
# One process more than cores: a quarter of the tests' time they wait, for a time-out or for another process.
TESTERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
# Those of the full suite wait more: for servers, clusters, and disks.
WAITERS = $(shell $(PYTHON) -c "import os; print(2 * os.cpu_count())")

# Or each process of the tests, several hundred, compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all lint reference docs docs-serve install clean

run: install
	$(HPO) run $(STUDY) --workers 4

# What a contributor needs at each change; databases in SQLite, no browser, no whole studies as commands.
test: install
	$(VENV)/bin/python -m pytest -n $(TESTERS) --dist worksteal -m "not full"

# The rest: files of long tests, PostgreSQL and MariaDB, storms, the browser, the documents' commands, the studies.
test-all: install
	$(VENV)/bin/python -m pytest -n $(WAITERS) --dist worksteal -m full

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The pages of docs/reference/ that are made from the code; commit what changes.
reference: install
	$(VENV)/bin/python docs/make_reference.py

# A warning is an error: a dead link or anchor, a page in no menu. With --quiet they would not be counted.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

install: $(VENV)/.installed

# Of 28,000 modules that pip would compile, one core at a time, few are ever imported: those are compiled then.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) site studies/*/runs
