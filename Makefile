# Every target sets up what it needs in .venv; nothing else on the machine is touched, apart from pip's and our own caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_VERSION := 0.5.23
SGLANG_VENV ?= $(HOME)/.cache/nsa-dcp/venv-sglang-$(SGLANG_VERSION)

.PHONY: help demo test test-sglang test-gpu lint bench clean

help:
	@echo 'make demo          tiny DSA models under every split, against the unmodified model (CPU, a few minutes)'
	@echo 'make test          the whole suite that needs no GPU'
	@echo 'make test-sglang   contract tests against the real sglang $(SGLANG_VERSION) (a cached environment of 11 GB)'
	@echo 'make test-gpu      the tests that need a Hopper GPU, with this Python and its torch'
	@echo 'make lint          ruff, import contracts'
	@echo 'make bench         kernel benchmarks on this GPU'

# A torch that the chosen Python has is used as it is; otherwise a CPU build is installed, if one can be had.
$(STAMP): pyproject.toml scripts/make_venv.sh
	PYTHON='$(PYTHON)' bash scripts/make_venv.sh $(VENV) '.[hf,plot,test]'
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.:kernels $(BIN)/lint-imports

test-gpu:
	$(PYTHON) -m pytest -m 'gpu or multi_gpu'

bench:
	PYTHONPATH=.:kernels $(PYTHON) scripts/bench_kernels.py

clean:
	rm -rf $(VENV)
