# Everything a newcomer needs: `make demo` and `make test` on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint test-slow clean

# llama-cpp-python is compiled here (a C++ compiler and CMake are needed, a few minutes the first time).
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/routeahead run -p "Once upon a time" -n 40 --resident
	$(BIN)/routeahead run -p "Once upon a time" -n 40 --cache-mb 1

test: $(VENV)/installed lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow --timeout 0

clean:
	rm -rf $(VENV) build
