# Every target sets up what it needs in .venv; nothing else on the machine is touched, apart from pip's and our own caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_VERSION := 0.5.23
SGLANG_VENV ?= $(HOME)/.cache/nsa-dcp/venv-sglang-$(SGLANG_VERSION)

.PHONY: help demo test test-cpu test-sglang test-gpu lint bench clean

help:
	@echo 'make demo          tiny DSA models under every split, against the unmodified model (CPU, a few minutes)'
	@echo 'make test          everything that needs no GPU: test-cpu, then test-sglang, whatever the first says'
	@echo 'make test-cpu      the suite of this package, and its coverage'
	@echo 'make test-sglang   contract tests against the real sglang $(SGLANG_VERSION); its environment (11 GB) is cached'
	@echo 'make test-gpu      the tests that need a Hopper GPU, with this Python and its torch'
	@echo 'make lint          ruff, mypy, import contracts'
	@echo 'make bench         kernel benchmarks on this GPU'

# A torch that the chosen Python has is used as it is; otherwise a CPU build is installed, if one can be had.
$(STAMP): pyproject.toml scripts/make_venv.sh
	PYTHON='$(PYTHON)' bash scripts/make_venv.sh $(VENV) '.[hf,plot,test]'
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

# One after the other, the second also where the first failed.
test:
	@failed=0; \
	$(MAKE) test-cpu || failed=1; \
	$(MAKE) test-sglang || failed=1; \
	exit $$failed

# Ranks are processes, so each test file's torch gets one thread.
test-cpu: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore tests/sglang --cov --cov-report=
	@# What a rank that a test killed was writing cannot be read.
	@rm -f .coverage.*
	@echo 'coverage: the total, and files below 80%; what needs the real sglang is run by test-sglang and is low here'
	@$(BIN)/python -m coverage report --sort=cover | awk '$$NF + 0 < 80 || /^TOTAL/'

# The real sglang brings its own torch and some 11 GB: one environment for all checkouts of this version.
$(SGLANG_VENV)/.installed:
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet 'sglang==$(SGLANG_VERSION)' hypothesis matplotlib 'pytest>=8' pytest-timeout pytest-xdist
	touch $@

test-sglang: $(SGLANG_VENV)/.installed
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -n 2 tests/sglang

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.:kernels $(BIN)/lint-imports

test-gpu:
	$(PYTHON) -m pytest -m 'gpu or multi_gpu'

bench:
	PYTHONPATH=.:kernels $(PYTHON) -m scripts.benchmarks.kernels.bench

clean:
	rm -rf $(VENV)
