# People, pre-commit and CI share these. PYTHON picks the interpreter the environment is made from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installed again whenever what it was made from changes.
STAMP := $(VENV)/.installed-$(shell cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: demo install test test-fast check format bench test-engines reference clean

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[torch]" --group bench --group dev --group test
	rm -f $(VENV)/.installed-*
	touch $@

demo: install
	$(BIN)/inlay demo

test: install
	$(BIN)/python -m pytest -m "not engines and not gpu"

test-fast: install
	$(BIN)/python -m pytest -m "not engines and not gpu and not slow"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks

test-engines: install
	$(BIN)/python scripts/test_engines.py

reference: install
	$(BIN)/python scripts/reference.py

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
