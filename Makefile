# Two commands matter on a fresh machine: `make demo` and `make test`.
# They install into .venv (override: VENV=path; an active environment: VENV=$VIRTUAL_ENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DEMO ?= demo
NEW_ENOUGH = sys.version_info >= (3, 11) or sys.exit("vlmexport needs Python 3.11 or newer: make PYTHON=python3.11")
STAMP := $(VENV)/.vlmexport-dev
DEMO_STAMP := $(VENV)/.vlmexport-demo

MINUTES ?= 5
SEED ?= 0
FIRST ?= 0
REQUESTS ?= 4000
TESTS ?= tests
POINTS ?= 200

.PHONY: install demo test test-unit test-contract test-all test-gpu bench-gpu docs serve-docs lint lint-docs format clean fuzz soak soak-server kill

install: $(STAMP)

$(STAMP): pyproject.toml models/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; $(NEW_ENOUGH)'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./models
	touch $@

$(DEMO_STAMP): pyproject.toml models/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; $(NEW_ENOUGH)'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[export,eval]' -e ./models
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo.py --output $(DEMO)

# The fast tests. TESTS="tests/unit -k kv" runs fewer.
test: install
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal $(TESTS)

test-unit test-contract: install
	$(MAKE) test TESTS=tests/$(@:test-%=%)

# Every combination.
test-all: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

# On a machine with an NVIDIA GPU. What is not there is skipped with a word. ONNX Runtime's CUDA provider takes the place of
# its CPU package: `pip uninstall onnxruntime`, then `pip install '.[gpu]'`; TensorRT: `pip install '.[tensorrt]'` (JetPack
# brings one), TensorRT-RTX comes with [dev].
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs

# The half hour: every step that this machine can do, results in benchmarks/results/gpu-NAME.json. FOLDER needs 20 GB.
bench-gpu: install
	$(BIN)/python -m benchmarks.gpu --all --save $(if $(FOLDER),--folder $(FOLDER))

fuzz: install
	$(BIN)/python -m tests.integration.fuzz.campaign --seed $(SEED) --first $(FIRST) \
		$(if $(COUNT),--count $(COUNT),--minutes $(MINUTES)) $(if $(SAVE),--save $(SAVE)) $(if $(FOLDER),--folder $(FOLDER))

soak: install
	$(BIN)/python -m tests.integration.soak.soak --requests $(REQUESTS) --seed $(SEED)

soak-server: install
	$(BIN)/python -m tests.integration.soak.serving --minutes $(MINUTES) --seed $(SEED)

kill: install
	$(BIN)/python -m tests.integration.kill.campaign --points $(POINTS) $(if $(SAVE),--save $(SAVE))

# The site, into site/. The reference is made from the code; a broken link is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

serve-docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# Prose of README, docs and help.
lint-docs: install
	$(BIN)/python -m docs.prose

lint: install lint-docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(DEMO) build dist site models/build .pytest_cache .ruff_cache
