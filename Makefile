# Everything a newcomer needs: `make demo` and `make test` on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast test-checked audit lint test-slow test-upstream docs package measurements calibration embedded-model second-model third-model clean

# llama-cpp-python is compiled here (a C++ compiler and CMake are needed, a few minutes the first time).
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

# A question to the embedded model: resident, streamed (the same answer, bit by bit) and with every
# selection committed two layers early (lossy). Its experts take 8 MiB; the cache gets 2.
QUESTION = "Translate to French: seven hundred ninety eight"

demo: $(VENV)/installed
	@echo "--- resident: everything in memory"
	$(BIN)/routeahead run -p $(QUESTION) -n 16 --resident
	@echo "--- streamed: experts are read as tokens route to them"
	$(BIN)/routeahead run -p $(QUESTION) -n 16 --cache-mb 2
	@echo "moe-token: how long a token took, and how much of it computed, waited for reads or kept the books."
	@echo "moe-cache: how many of a token's experts were in memory, and what was read for those that were not."
	@echo "moe-overlap: how long reads took, and how much of that went on while the token computed."
	@echo "--- route-ahead 2: a layer's experts are chosen two layers early, so that reads begin early"
	$(BIN)/routeahead run -p $(QUESTION) -n 16 --cache-mb 2 --route-ahead 2
	@echo "moe-route-ahead: how many selections were committed early, and how often the router agreed."
	@echo "moe-prefetch: what was read early, and how much of it was then used."

# Two workers: many tests wait for disks and processes. Those of the group "machine" share one.
PYTEST = $(BIN)/python -m pytest --durations=20
TEST_WORKERS ?= 2
CHECKED = $(addprefix tests/model/test_,identity.py early_reads.py speculation.py schedules.py faults.py \
    lifecycle.py memory.py prefetch.py slot_ids.py) tests/unit/test_lanes.py tests/unit/test_slots.py

test: $(VENV)/installed lint
	$(PYTEST) -n $(TEST_WORKERS) --dist loadgroup

# Unit tests, in a process that never loads llama.cpp, and some of each kind of the others.
test-fast: $(VENV)/installed
	$(PYTEST) tests/unit
	$(PYTEST) tests/model tests/cli -m fast -n $(TEST_WORKERS) --dist loadgroup

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Suspicious code, and dependencies with known vulnerabilities (asks PyPI).
audit: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[audit]'
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src
	$(BIN)/pip-audit --progress-spinner off --skip-editable

# The engine's tests with Python's own checks on, and memory that is freed or new full of rubbish.
test-checked: $(VENV)/installed
	PYTHONDEVMODE=1 MALLOC_PERTURB_=165 $(PYTEST) -n $(TEST_WORKERS) --dist loadgroup \
	    -W error::ResourceWarning -W error::pytest.PytestUnraisableExceptionWarning $(CHECKED)

test-slow: $(VENV)/installed
	$(PYTEST) -m slow --timeout 0 -n $(TEST_WORKERS) --dist loadgroup

# llama-cpp-python's own tests, with the plain class and with this one (downloads its source archive).
test-upstream: $(VENV)/installed
	mkdir -p build/upstream
	$(BIN)/python tests/clients/upstream.py build/upstream

# The documentation as a site, in build/site; a link that leads nowhere ends it.
docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

# What would be published, in dist, checked.
package: $(VENV)/installed
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Everything that docs/measurements.md says, measured anew here (half an hour; what is in build/ already
# is not measured again).
measurements: $(VENV)/installed
	$(BIN)/python benchmarks/measurements.py src/routeahead/models/default.gguf build/measurements/embedded
	$(BIN)/python benchmarks/measurements.py benchmarks/data/second.gguf build/measurements/second --passes 0
	cp -r build/measurements docs/
	$(BIN)/python benchmarks/measurements_page.py docs

# The figures of docs/calibration.md (an hour; what is in build/calibration already is not measured again).
CALIBRATED = build/calibration
calibration: $(VENV)/installed
	mkdir -p $(CALIBRATED)
	benchmarks/calibration.sh $(BIN) $(CALIBRATED)

# The trained models, anew from their data (hours). They need Debian's wordnet-base.
embedded-model: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[train]'
	$(BIN)/python training/train.py build/embedded
	$(BIN)/python training/export.py build/embedded src/routeahead/models/default.gguf

second-model: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[train]'
	$(BIN)/python training/train.py build/second --model qwen2moe --float32
	$(BIN)/python training/export.py build/second benchmarks/data/second.gguf --model qwen2moe --experts Q8_0

third-model: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[train]'
	$(BIN)/python training/train.py build/third --model deep --tokens 1.72e6 --batch 2048 --float32
	$(BIN)/python training/export.py build/third benchmarks/data/third.gguf --model deep --experts Q8_0

clean:
	rm -rf $(VENV) build
