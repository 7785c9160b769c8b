# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUTPUT ?= demo-output
# Ranks run single-threaded; more threads than cores only slow the tests down.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help venv demo test test-browser check lint types soak test-gpu bench-peer bench-spec package clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(VENV)/.installed  ## virtual environment with everything pinned by constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24' 'setuptools>=77' wheel -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: venv  ## local Ray, two ranks, the shipped prompts through a synthetic checkpoint
	$(BIN)/deepinfer-ray demo --output $(OUTPUT)

test: venv  ## every test that needs neither a GPU nor a browser
	$(BIN)/python -m pytest -m 'not soak and not gpu and not browser'

test-browser: venv  ## the report in headless Chromium, which must be installed
	$(BIN)/python -m pytest -m browser

check: venv lint types  ## lint, types and the fast tests (< 4 min)
	$(BIN)/python -m pytest -m 'not soak and not gpu and not browser and not ray and not slow' -q

lint: venv  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv  ## mypy
	$(BIN)/mypy

soak: venv  ## the long runs
	$(BIN)/python -m pytest -m soak --timeout 7200

test-gpu:  ## tests of a CUDA device with the Python at hand (no virtual environment, no Ray)
	$(PYTHON) -m pytest -m gpu tests/gpu

bench-peer: venv  ## tokens/s of a tiny checkpoint beside transformers
	$(BIN)/python -m pip install --quiet -c constraints.txt transformers
	$(BIN)/python jobs/bench_peer.py

bench-spec: venv  ## tokens/s with and without drafts, side by side
	$(BIN)/deepinfer-ray bench spec

package: venv  ## wheel and sdist
	$(BIN)/python -m build --no-isolation

clean:  ## everything that was generated
	rm -rf $(VENV) build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache
