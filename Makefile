# Every target sets up what it needs: a virtual environment in .venv, reinstalled only when pyproject.toml changes.
# Settings: PYTHON=/path/to/python3.12 (3.10 to 3.14; else the first suitable one on PATH), WORKERS=2, PYTEST_ARGS=...,
# DEV=dev-all for the packages of all tests, as .ci/run has them (1.2 GB more: OpenCL on CPUs, clang).

VENV := .venv
TORCH_VENV := .venv-torch
DOCS_VENV := .venv-docs
DIST_VENV := .venv-dist
ARM_VENV := .venv-arm
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --quiet --disable-pip-version-check
DEV ?= dev
WORKERS ?= 2
# Machines with GPUs may lack a network: without a .venv their own interpreter is used.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)
GPU_WORKERS ?= 12
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 3600
CHECKED := python apps examples release tests

.PHONY: help demo test test-slow test-timing test-torch test-npu test-arm test-all gpu fuzz lint format conformance docs dist workers clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo         rank sentences with a real embedding model, cut over two devices"
	@echo "make test         the test suite (under ten minutes on two cores); DEV=dev-all with OpenCL on CPUs and clang"
	@echo "make test-slow    long tests that rarely find more; make test-timing: tests of measured time or resident"
	@echo "                  memory, on a quiet machine; make test-all: all of them"
	@echo "make test-torch   rh.from_torch and the reference of language models against PyTorch, in $(TORCH_VENV)"
	@echo "make test-npu     tests of two devices with a simulated accelerator as the second one"
	@echo "make test-arm     tests of kernels on an emulated AArch64 CPU, and some of programs; needs qemu-user,"
	@echo "                  mmdebstrap and g++-aarch64-linux-gnu (Debian, Ubuntu), and sets up $(ARM_VENV)"
	@echo "make gpu          tests that need an NVIDIA GPU (under eight minutes on 16 cores), with $(GPU_PYTHON); no network"
	@echo "make fuzz         attack the library for FUZZ_SECONDS=3600 with random models, sizes, arguments and files"
	@echo "make lint         ruff check, ruff format --check, mypy, import-linter"
	@echo "make format       let ruff fix and format the code"
	@echo "make conformance  ONNX's backend suite, here and in stock TVM (long)"
	@echo "make docs         build the site in build/site; broken links and outdated pages are errors"
	@echo "make dist         build wheel and source distribution of the last commit in dist, twice with the same bytes,"
	@echo "                  and the wheel relax-hetero-runtime of the working tree"
	@echo "make workers      write the LLVM IR of the worker threads, after a change of their C code"
	@echo "make clean        remove caches and build outputs; make distclean: also .cache and $(VENV)"

demo: $(VENV)/.stamp-demo
	@$(PY) apps/sentence_similarity/run.py

# By default pytest leaves out tests marked slow and timing (tests/python/conftest.py).
test: $(VENV)/.stamp-$(DEV)
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(VENV)/.stamp-$(DEV)
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "slow and not timing" $(PYTEST_ARGS)

# One test at a time: parallel tests would disturb each other.
test-timing: $(VENV)/.stamp-$(DEV)
	$(PY) -m pytest -q -m timing $(PYTEST_ARGS)

# If torch is installed, TVM imports it in every process, and tests start many: so torch has an environment of its own.
test-torch: $(TORCH_VENV)/.stamp-dev
	$(TORCH_VENV)/bin/python -m pytest -q tests/python/frontend/torch tests/python/compat tests/python/llm tests/python/test_docs.py -k torch $(PYTEST_ARGS)

# Every test of two devices that takes any, with the simulated accelerator of examples/backend_npu as the second one.
test-npu: $(VENV)/.stamp-$(DEV)
	RELAX_HETERO_TEST_SECOND=npu $(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "two_devices and not slow and not gpu" $(PYTEST_ARGS)

# Kernels, command buffers, networks whole and cut, language models of real widths, commands of the documents.
gpu:
	@PYTHONPATH=python:$$PYTHONPATH $(GPU_PYTHON) tests/python/gpu/needs.py
	$(GPU_PYTHON) -m pytest -q -n $(GPU_WORKERS) --dist worksteal -m gpu $(PYTEST_ARGS)

test-arm: $(VENV)/.stamp-$(DEV) $(ARM_VENV)/.stamp
	$(PY) tests/python/arm/suite.py -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-all: test test-slow test-timing test-torch test-npu

# Attacks with random models, sizes, arguments and files, in child processes. Half a minute of them is in `make test`.
fuzz: $(VENV)/.stamp-$(DEV)
	$(PY) tests/python/fuzz/run.py --seconds $(FUZZ_SECONDS)

lint: $(VENV)/.stamp-$(DEV)
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.stamp-$(DEV)
	$(PY) -m ruff check --fix $(CHECKED)
	$(PY) -m ruff format $(CHECKED)

conformance: $(VENV)/.stamp-$(DEV)
	$(PY) apps/onnx_backend/run.py --write-docs

# The home page is build/site/index.html, and needs no server. Notebooks write their files where MkDocs is started.
docs: $(DOCS_VENV)/.stamp-docs
	$(DOCS_VENV)/bin/python docs/tools/api_pages.py --check
	$(DOCS_VENV)/bin/python docs/pictures/packages_picture.py --check
	@mkdir -p build/notebooks
	cd build/notebooks && NO_MKDOCS_2_WARNING=1 $(CURDIR)/$(DOCS_VENV)/bin/python -m mkdocs build --strict --config-file ../../mkdocs.yml

# The wheel is built from the source distribution; both are checked as a package index does. The wheel of the run time
# has a part of the installed TVM.
dist: $(DIST_VENV)/.stamp-dist $(VENV)/.stamp-$(DEV)
	$(DIST_VENV)/bin/python release/build.py
	$(PY) release/runtime_wheel.py dist
	$(DIST_VENV)/bin/python -m twine check --strict dist/relax_hetero_runtime-*.whl

# The package ships C and LLVM IR: only a change of workers.c needs a compiler.
workers: $(VENV)/.stamp-dev-all
	$(PY) python/relax_hetero/driver/link/threads/generate.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis python/*.egg-info
	find python apps tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(TORCH_VENV) $(DOCS_VENV) $(DIST_VENV) $(ARM_VENV) .cache

# The interpreter is run, not only looked up: version managers put names on PATH that do not run,
# and some distributions ship a Python whose venv module lacks pip.
$(PY):
	@ok='import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'; \
	for name in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10); do \
	  IFS=:; \
	  for folder in $$PATH; do \
	    case "$$name" in */*) p=$$name ;; *) p=$$folder/$$name ;; esac; \
	    if "$$p" -c "$$ok" >/dev/null 2>&1; then \
	      echo "Creating $(VENV) with $$("$$p" --version)"; \
	      "$$p" -m venv --clear $(VENV) && exit 0; \
	      rm -rf $(VENV); exit 1; \
	    fi; \
	  done; \
	done; \
	echo "relax-hetero needs a Python from 3.10 to 3.14 with the venv and ensurepip modules, and found none on PATH" >&2; \
	echo "(python3 is $$(python3 --version 2>&1 | head -n 1)). On Debian or Ubuntu: apt install python3-venv." >&2; \
	echo "Another interpreter is chosen with: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

$(VENV)/.stamp-demo: pyproject.toml | $(PY)
	@echo "Installing relax-hetero and its dependencies into $(VENV) (first time: a few minutes)"
	@$(PIP) install --editable '.[demo]'
	@touch $@

$(VENV)/.stamp-dev $(VENV)/.stamp-dev-all: $(VENV)/.stamp-%: pyproject.toml | $(PY)
	@echo "Installing relax-hetero and its development tools into $(VENV) (first time: a few minutes)"
	@$(PIP) install --editable '.[$*]'
	@touch $(VENV)/.stamp-demo $@

$(TORCH_VENV)/.stamp-dev: pyproject.toml | $(PY)
	@echo "Installing relax-hetero, its development tools and PyTorch into $(TORCH_VENV)"
	@$(PY) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip --quiet --quiet --disable-pip-version-check install --editable '.[dev-torch]'
	@touch $@

$(ARM_VENV)/.stamp: pyproject.toml tests/python/arm/environment.py | $(PY)
	@echo "Installing Python, TVM and development tools for AArch64 into $(ARM_VENV)"
	@$(PY) tests/python/arm/environment.py

$(DOCS_VENV)/.stamp-docs: pyproject.toml | $(PY)
	@echo "Installing relax-hetero and MkDocs into $(DOCS_VENV)"
	@$(PY) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --quiet --quiet --disable-pip-version-check install --editable '.[docs]'
	@touch $@

# Fixed versions, because the same commit is built into the same bytes.
$(DIST_VENV)/.stamp-dist: Makefile | $(PY)
	@echo "Installing build, setuptools and twine into $(DIST_VENV)"
	@$(PY) -m venv $(DIST_VENV)
	@$(DIST_VENV)/bin/python -m pip --quiet --quiet --disable-pip-version-check install build==1.5.0 setuptools==83.0.0 twine==6.2.0
	@touch $@
