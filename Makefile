# Every target sets up what it needs in .venv by itself; PYTHON=... uses another interpreter as it is.
.DEFAULT_GOAL := help
SHELL := bash

ifdef PYTHON
SETUP :=
PARALLEL :=
export PYTHONPATH := src
else
PYTHON := .venv/bin/python
SETUP := .venv/.ready
PARALLEL := --numprocesses auto
endif

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.venv/.ready: pyproject.toml
	@test -x .venv/bin/python || python3 -m venv .venv
	@echo "Installing linattn and its tools into .venv (PyTorch is large: a few minutes the first time)"
	@.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[all,dev]'
	@touch $@

setup: $(SETUP) ## Fill .venv with everything

lint: $(SETUP) ## Style
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(SETUP) ## Types
	$(PYTHON) -m mypy

test: $(SETUP) lint types ## Everything a change must pass: style, types, tests
	$(PYTHON) -m pytest $(PARALLEL) -m "not slow and not gpu"

browser: ## Install Chromium, in which a test opens the report (Debian and Ubuntu, as root)
	@command -v chromedriver > /dev/null || (apt-get -qq update && apt-get -qq install -y chromium chromium-driver) > /dev/null 2>&1

test-gpu: $(SETUP) ## On a machine with a GPU: every kernel and every contract, compiled (WORKERS=8: in so many processes)
	$(PYTHON) tools/test_gpu.py

test-slow: $(SETUP) ## What takes long: every mechanism through the code that torch.compile generates
	$(PYTHON) -m pytest -m slow

demo: $(SETUP) ## Compare five mechanisms on real digits, two seeds each: table and report in runs/compare-digits
	$(PYTHON) -m linattn compare

tour: $(SETUP) ## The mechanisms, their forms agreeing, linear against softmax attention
	$(PYTHON) -m linattn tour

bench: $(SETUP) ## Measure time and memory into results/ (a quiet machine, please)
	$(PYTHON) -m linattn bench --publish results/cpu

readme: $(SETUP) ## Rewrite the generated parts of the README and of pages
	$(PYTHON) tools/update_readme.py

docs: $(SETUP) ## Build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

.PHONY: help setup lint types test browser test-gpu test-slow demo tour bench readme docs
