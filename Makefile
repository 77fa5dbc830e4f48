# make demo: see it work.   make test: check all of it.   Both install what they need into .venv first, once.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint slow bench clean

demo: $(INSTALLED)
	@$(BIN)/tilewise demo

# One thread a worker: JOBS workers share the cores. pytest's last line stays the last thing printed.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

slow: $(INSTALLED)
	@$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/tilewise bench

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -c "import triton" 2>/dev/null || $(TRITON)
	$(BIN)/python -m pip install --editable ".[cli,test,dev]"
	@touch $@

# With an NVIDIA GPU the newest torch, which brings CUDA and its own Triton; without one this release, which CI tests.
# Its CPU build has no Triton; the kernels' tests on the CPU want one (Linux on x86-64 has wheels).
TORCH  = $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo torch || echo torch==2.13.0)
TRITON = $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && echo '$(BIN)/python -m pip install "triton==3.7.*"' || echo true)
