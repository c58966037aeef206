PYTHON ?= python3
VENV := .venv
HPO := $(VENV)/bin/hpo
STUDY := studies/digits/study.yaml

.PHONY: run test lint install clean

run: install
	$(HPO) run $(STUDY) --workers 4

test: install
	$(VENV)/bin/python -m pytest -n auto --dist worksteal

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) studies/*/runs
