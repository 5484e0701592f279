# serve · test · check · bench: each first sets up what it needs, on a fresh machine with Python 3.11 or newer.
# Another interpreter: make PYTHON=/path/to/python3.13 ... (only looked at while .venv is not whole).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
PAIR := --target models/demo/target --draft models/demo/draft
ENGINEERED := --target .cache/engineered/target --draft .cache/engineered/draft-0.9 --max-tokens 32
# Workers as tests/workers.py says; the tests of a group stay together, long groups first.
PYTEST := $(BIN)/python -m pytest -q -n auto --dist loadscope --no-loadscope-reorder
CLIENTS := openai langchain litellm llama-index inspect-ai lm-eval oldest
RULES := tests/test_imports.py tests/test_layout.py tests/test_budgets.py
POLICIES := --spec off,1,2,4,8,goodput --threads 2

export RAY_USAGE_STATS_ENABLED = 0
export PYTHONPATH = $(CURDIR)
# Empty, so that compiled modules are kept: otherwise each process of a test compiles them again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup setup-external serve test check format bench clean test-external test-clients \
    proofs proofs-matrix proofs-others proofs-law proofs-examples proofs-slotted proofs-gathered

help:
	@echo "make serve | test | test-external | test-clients | proofs | check | format | bench | clean"

setup: $(READY)

# Only the dependencies go into the environment. torch first and alone: the rest then settles on that version.
$(READY): pyproject.toml scripts/foretoken
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) # also one that was cut short
	$(BIN)/python -c "import tomllib; d = tomllib.load(open('pyproject.toml', 'rb')); \
	    print(*d['project']['dependencies'], *d['dependency-groups']['dev'], sep='\n')" > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt
	install -m 755 scripts/foretoken $(BIN)/foretoken
	@touch $@

serve: $(READY)
	$(BIN)/python -m deployments.launch serve_config.yaml

test: $(READY)
	$(PYTEST) --durations 10 $(addprefix --ignore=,$(RULES)) $(ARGS)

# Tests that need a browser or Prometheus, installed on Debian if they can be, or other projects' clients from PyPI. What
# is missing is listed as skipped, with the reason.
test-external: setup-external
	$(PYTEST) -n 2 -rs -m external tests/external $(ARGS)

setup-external: $(READY)
	scripts/setup_external.sh
	scripts/setup_clients.sh $(CLIENTS)

# All clients. guidellm is slow to install and to start.
test-clients: $(READY)
	scripts/setup_clients.sh
	$(BIN)/python -m pytest -q -rs -m external tests/external/clients $(ARGS)

# What `test` leaves out: long searches, the law of every combination of settings, drafters and verifiers (about an hour
# on one core), most faults put into Triton kernels and the kernels of compute capability 8.6 and 8.9, ten times as many
# examples of Hypothesis, and all of the engine's tests over the other kinds of KV memory. All of it takes hours on two
# cores, so each part is a target: docs/log.md tells when each one last passed.
proofs: proofs-matrix proofs-others proofs-law proofs-examples proofs-slotted proofs-gathered

proofs-matrix: $(READY)
	$(PYTEST) -m proofs tests/engine/test_matrix.py $(ARGS)

proofs-others: $(READY)
	$(PYTEST) -m proofs --ignore tests/engine/test_matrix.py --ignore tests/engine/law $(ARGS)

proofs-law: $(READY)
	$(PYTEST) -m proofs tests/engine/law $(ARGS)

proofs-examples: $(READY)
	$(PYTEST) -m hypothesis --hypothesis-profile=proofs $(ARGS)

proofs-slotted: $(READY)
	$(PYTEST) --kv slotted tests/engine $(ARGS)

proofs-gathered: $(READY)
	$(PYTEST) --kv gathered tests/engine --ignore tests/engine/law $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(RULES)

format: $(READY)
	$(BIN)/ruff check -q --fix .
	$(BIN)/ruff format -q .

bench: $(READY)
	$(BIN)/python -m benchmarks.decode $(PAIR) $(POLICIES) --concurrency 1,4,8,16 --repeats 8
	$(BIN)/python -m benchmarks.load $(PAIR) $(POLICIES) --repeats 4
	scripts/setup_peers.sh
	$(BIN)/python -m benchmarks.peers $(PAIR) --concurrency 1,8 --threads 2
	$(BIN)/python -m benchmarks.engineered .cache/engineered --acceptance .9
	for precision in "--dtype float32" "--dtype bfloat16" "--weights int8"; do \
	    $(BIN)/python -m benchmarks.peers $(ENGINEERED) $$precision --concurrency 1,8 --threads 2 || exit; done
	$(BIN)/python -m benchmarks.acceptance $(PAIR) --threads 2
	$(BIN)/python -m benchmarks.copying $(PAIR) --threads 2
	$(BIN)/python -m benchmarks.sampling $(PAIR) --threads 2
	$(BIN)/python -m benchmarks.memory $(PAIR) --threads 2
	$(BIN)/python -m benchmarks.telemetry $(PAIR) --threads 2

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
