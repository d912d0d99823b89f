# Everything a newcomer or CI runs. Needs Python >= 3.10 and make, nothing else.
#
#   make demo        train a transformer with differential privacy, with defaults (5 minutes on 2 cores)
#   make test        run the tests
#   make help        list the rest
#
# Variables:
#   PYTHON=python3.12           which Python makes the environment
#   VENV=.venv                  where it lies
#   TORCH_INDEX=URL             a package index to take torch from (for instance PyTorch's own index of CPU builds,
#                               which are a tenth of the size of the default ones)
#   DEMO_ARGS="--epsilon 3"     options handed to `ghostclip finetune`
#   TEST_ARGS="-k embedding"    options handed to pytest
#   TORCH="2.8.0 2.15.0"        versions of torch that `make test-torch` runs the core tests on
#   DEVICE=cuda                 where `make test-gpu` runs its tests; cpu rehearses them

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
DEMO_ARGS ?=
TEST_ARGS ?=
TORCH ?=
DEVICE ?= cuda
BENCH_ARGS ?=
PAPER_ARGS ?=
ACCURACY_ARGS ?=
# More workers than this only take memory: every one of them loads torch.
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() or 1))" 2>/dev/null || echo 1)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt --build-constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One stamp for those who run, one for those who develop; each older than what it was made from is made anew.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
CHECKED := ghostclip tests benchmarks paper_repro docs

.DEFAULT_GOAL := help
.PHONY: help demo tutorials test test-thorough package test-slow test-kernels test-gpu test-torch test-all lint format typecheck check docs bench bench-micro bench-peers paper accuracy examples clean distclean

help:  ## list what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "ghostclip needs Python >= 3.10; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "==> making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "python's venv module failed (on Debian or Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing ghostclip and what the demo needs into $(VENV) (a few minutes the first time)"
	@$(PIP) install --quiet --upgrade "pip>=25.3"
	@$(INSTALL) --editable ".[transformers]"
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "==> installing what the tests, linters and benchmarks need into $(VENV)"
	@$(INSTALL) --editable ".[transformers,bench]" --group dev
	@# Its dependency torchvision does not import beside torch's CPU build; a stand-in has the little that is needed.
	@$(INSTALL) --no-deps timm
	@touch $@

demo: $(RUN_STAMP)  ## train a transformer privately on real text and show where the results lie
	@echo "==> ghostclip finetune $(DEMO_ARGS)"
	@$(BIN)/ghostclip finetune $(DEMO_ARGS)

test: $(DEV_STAMP)  ## run the quick tests, which hold every promise once, on $(JOBS) processes (about 4 minutes on 2 cores)
	@echo "==> pytest, quick tests, $(JOBS) processes"
	@# A file's tests in one process: what several of them look at, processes above all, is made once.
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow and not thorough" $(TEST_ARGS)

test-thorough: $(DEV_STAMP)  ## run all tests but those marked slow, as `make check` does
	@echo "==> pytest, $(JOBS) processes"
	@$(BIN)/python -m pytest -q -n $(JOBS) $(TEST_ARGS)

test-slow: $(DEV_STAMP)  ## run the tests marked slow
	@echo "==> pytest, slow tests"
	@$(BIN)/python -m pytest -q -n $(JOBS) -m slow $(TEST_ARGS)

test-kernels: $(DEV_STAMP)  ## run the Triton kernels in Triton's interpreter (installs Triton)
	@$(INSTALL) "triton"
	@$(PIP) install --quiet "numpy<2.4"  # Triton's interpreter makes numbers of arrays of one entry
	@echo "==> pytest, kernels"
	@$(BIN)/python -m pytest -q tests/kernels $(TEST_ARGS)

# In an environment that is there, or in none: a machine with a GPU has a torch of its own, and often no network.
test-gpu:  ## run one test of every case, kernel and rule on a GPU (another device: DEVICE=cpu)
	@echo "==> pytest on $(DEVICE)"
	@$(if $(wildcard $(DEV_STAMP)),$(BIN)/python,$(PYTHON)) -m pytest -q --device $(DEVICE) -m "(gpu or cuda) and few" $(TEST_ARGS)

test-torch:  ## run the core tests on other versions of torch: make test-torch TORCH="2.8.0 2.15.0"
	@test -n "$(TORCH)" || { echo 'name versions: make test-torch TORCH="2.8.0 2.15.0"' >&2; exit 1; }
	@TORCH_INDEX=$(TORCH_INDEX) $(PYTHON) .ci/torch_versions.py $(TORCH) --jobs $(JOBS)

test-all: $(DEV_STAMP)  ## run every test
	@echo "==> pytest, all tests, $(JOBS) processes"
	@$(BIN)/python -m pytest -q -n $(JOBS) -m "slow or not slow" $(TEST_ARGS)

lint: $(DEV_STAMP)  ## check style, docstrings and formatting
	@echo "==> ruff check, ruff format --check, pydoclint"
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/pydoclint --quiet ghostclip

format: $(DEV_STAMP)  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

typecheck: $(DEV_STAMP)  ## check types on the whole package
	@echo "==> mypy"
	@$(BIN)/mypy

package: $(DEV_STAMP)  ## build sdist and wheel, install them in a fresh environment and try them (into dist with KEEP=dist)
	@echo "==> .ci/packages.py"
	@$(BIN)/python .ci/packages.py $(if $(KEEP),--keep $(KEEP))

check: lint typecheck package test-thorough  ## everything CI runs

docs: $(DEV_STAMP)  ## build the pages of docs/, to be read without a network
	@echo "==> sphinx"
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(DEV_STAMP)  ## time, FLOPs and memory beside non-private PyTorch and Opacus
	@echo "==> python -m benchmarks $(BENCH_ARGS)"
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: $(DEV_STAMP)  ## install JAX and BackPACK, so that `make bench` compares with them as well
	@$(INSTALL) -e ".[peers]"
	@# Its dependency torchvision does not import beside torch's CPU build, and is not needed.
	@$(INSTALL) --no-deps "backpack-for-pytorch" "unfoldNd" "einops"

bench-micro: $(DEV_STAMP)  ## pytest-benchmark pieces, one layer at a time
	@$(BIN)/python -m pytest -q -o addopts="--import-mode=importlib --strict-markers" benchmarks/micro

paper: $(DEV_STAMP)  ## measure the published tables again (about 40 minutes for all five)
	@for table in A B C D E; do $(BIN)/python -m paper_repro $$table $(PAPER_ARGS) || exit 1; done

accuracy: $(DEV_STAMP)  ## accuracy of sampling and noise mechanisms at equal ε (installs scikit-learn; about 10 minutes on 2 cores)
	@$(INSTALL) "scikit-learn"
	@$(BIN)/python -m paper_repro F $(ACCURACY_ARGS)

examples: $(DEV_STAMP)  ## run the example trainings, written as users of Opacus write them, with their audits (about 20 minutes)
	@$(BIN)/python -m paper_repro.examples

tutorials: $(DEV_STAMP)  ## run the tutorials and write their pages, output and pictures into docs/tutorials (about 6 minutes)
	@$(BIN)/python -m paper_repro.tutorials

clean:  ## remove caches and build products
	@rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find ghostclip tests benchmarks paper_repro -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the environment as well
	@rm -rf $(VENV)
