PYTHON ?= python3
TORCH  ?= torch==2.13.0
# That of the tests in vLLM, whose package for CPUs asks for this build.
VLLM_TORCH ?= torch==2.13.0+cpu
OUTPUT ?= runs/quickstart
ARGS   ?=

VENV  := .venv
RUN   := $(VENV)/bin/python
STAMP := $(VENV)/.ready
# The tests read no network, and their workers share the cores instead of fighting over them. A worker takes whole files,
# whose models and servers are then made once, and at the end what another has not come to.
SETTINGS := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
TESTS    := -m pytest -n 2 --dist worksteal

# The oldest and the newest versions that pyproject.toml allows, and the tests of what these libraries do with our
# models. Without test_serving: before 5.23, `transformers serve` loads no model with code of its own.
ENDS   := oldest newest
STOCK  := versions modeling cache generation padding configuration remote_code peft lm_eval hub train engines finetune_lora
STOCK  += mistakes conversion fused_layers fused_inputs triton_versions hub_kernel

# Python compiles what is imported, and keeps it; pip would compile all that it installs, most of which nobody imports.
INSTALL := install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-slow test-all test-vllm $(ENDS:%=test-%) lint bench gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   a real Llama in minutes: fetched, converted, taught, asked; ARGS=--from-scratch trains a small one"
	@echo "make test         style, types and the fast tests"
	@echo "make test-slow    the long tests"
	@echo "make test-all     style, types and all tests"
	@echo "make test-oldest  the tests of the models with the oldest supported libraries"
	@echo "make test-newest  the same with the newest"
	@echo "make test-vllm    the tests of the plugin for vLLM, in an environment of its own"
	@echo "make lint         style and types only"
	@echo "make bench        the performance tables"
	@echo "make gpu          on a GPU: check the kernels, then every table, in 25 minutes; goes on where it was stopped"
	@echo "make clean        remove caches and builds (the environment and runs/ stay)"
	@echo "Options are passed on: make quickstart ARGS='--minutes 2 --data my_texts/'"

quickstart: $(STAMP)
	@$(RUN) -m examples.quickstart --output $(OUTPUT) --overwrite $(ARGS)

test: lint
	@$(SETTINGS) $(RUN) $(TESTS) -m "not slow" $(ARGS)

test-slow: $(STAMP)
	@$(SETTINGS) $(RUN) $(TESTS) -m "slow and not exhaustive" $(ARGS)

test-all: lint
	@$(SETTINGS) $(RUN) $(TESTS) $(ARGS)

$(ENDS:%=test-%): test-%: $(VENV)/%/.ready
	@VERSIONS=$* $(SETTINGS) $(VENV)/$*/bin/python $(TESTS) -m "not slow" $(STOCK:%=tests/test_%.py) $(ARGS)

test-vllm: $(VENV)/vllm/.ready
	@$(SETTINGS) $(VENV)/vllm/bin/python $(TESTS) -m "not slow" tests/vllm $(ARGS)

lint: $(STAMP)
	@$(RUN) -m ruff check --quiet --output-format concise .
	@$(RUN) -m ruff format --check --quiet . || { echo "Some files are not formatted: run $(RUN) -m ruff format ."; exit 1; }
	@$(RUN) -m mypy

bench: $(STAMP)
	@$(RUN) -m benchmarks $(ARGS)

gpu: $(STAMP)
	@$(RUN) -m benchmarks.gpu_day $(ARGS)

clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# An environment that already holds everything is only linked to this repository: pip finds nothing to fetch. Torch comes
# first and alone, so that another build (CUDA, ROCm, nightly) can be chosen with TORCH=..., and is then held in place.
$(STAMP): pyproject.toml
	@test -x $(RUN) || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(RUN) -c "import torch" 2>/dev/null || { echo "Installing $(TORCH)"; $(RUN) -m pip $(INSTALL) $(TORCH); }
	@echo "Installing modeling-interdomain and its tools into $(VENV)"
	@$(RUN) -m pip $(INSTALL) "pip>=22.3" "setuptools>=77"
	@$(RUN) -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/held.txt
	@$(RUN) -m pip $(INSTALL) --no-build-isolation --constraint $(VENV)/held.txt --editable ".[test]"
	@touch $@

# The oldest and the newest versions stand in environments of their own, before everything else from $(VENV). On
# PYTHONPATH they would be missing in the processes that some tests start without it. pip must not see $(VENV) there, or
# it would replace what is in it: both are joined with it after the installation.
$(ENDS:%=$(VENV)/%/.ready): $(VENV)/%/.ready: tests/%.txt $(STAMP)
	@echo "Installing the $* supported versions into $(VENV)/$*"
	@$(RUN) -m venv --clear --without-pip $(VENV)/$*
	@$(RUN) -m pip --python $(VENV)/$*/bin/python $(INSTALL) --no-deps --requirement tests/$*.txt
	@site() { $$1 -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }; \
	echo "import site; site.addsitedir('$$(site $(RUN))')" > "$$(site $(VENV)/$*/bin/python)/others.pth"
	@touch $@

# vLLM asks for an older Transformers than this package does, and brings builds of torchvision, torchaudio and torchcodec
# that do not fit its PyTorch: what it wants is installed first and alone, and then this repository without asking.
# Each step finds what an interrupted one has left.
$(VENV)/vllm/.ready: tests/vllm.txt
	@echo "Installing vLLM into $(VENV)/vllm"
	@test -x $(VENV)/vllm/bin/python || $(PYTHON) -m venv $(VENV)/vllm
	@$(VENV)/vllm/bin/python -m pip $(INSTALL) $(VLLM_TORCH)
	@$(VENV)/vllm/bin/python -m pip $(INSTALL) --requirement tests/vllm.txt $(VLLM_TORCH)
	@$(VENV)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VENV)/vllm/bin/python -m pip $(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
