# Every target sets up what it needs: a virtual environment in .venv, and the extras it uses, once.
PYTHON ?= python3
BIN := .venv/bin
VERSION ?= 2.15.0
# Tests run in as many processes, one thread each: more threads than cores slow all of them down.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile
ONE_THREAD := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo picture docs report-pictures browser import-graph test test-all test-torch coverage lint format \
  bench bench-exact bench-planners bench-time bench-resident bench-plan bench-native bench-overhead bench-scaling \
  bench-published bench-inductor bench-referee bench-chain bench-blocks bench-start bench-distributed bench-same curves \
  reproduce clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

demo: .venv/.installed-picture ## train two small models plain and in half the memory; writes out/demo
	$(BIN)/python -m lowtide demo --out out/demo --force

picture: demo ## refresh the picture in the README from a run of the demo
	mkdir -p docs/images && cp out/demo/memory.png docs/images/memory.png

docs: .venv/.installed-docs ## build the documentation into site; warnings are errors
	$(BIN)/mkdocs build --strict

browser: .browser/chromium ## get a headless Chromium from npm for the report's tests; or set LOWTIDE_CHROMIUM to yours

report-pictures: .browser/chromium .venv/.installed-dev ## refresh the pictures of a report in the documentation
	$(BIN)/python benchmarks/report_pictures.py --chromium .browser/chromium

import-graph: .venv/.installed-picture ## refresh the picture of which package imports which, from the code itself
	$(BIN)/python -m lowtide.testing.import_graph docs/images/imports.png

test: lint ## check style and types, then run the tests that take minutes at most
	$(ONE_THREAD) $(BIN)/python $(PYTEST) -m "not slow"

test-all: .venv/.installed-zoo lint ## the same with all tests, also sweeps and those that need real models
	LOWTIDE_ALL_EXAMPLES=1 $(ONE_THREAD) $(BIN)/python $(PYTEST)

test-torch: .venv-torch-$(VERSION)/.installed ## the tests with another PyTorch, in an environment of its own; VERSION=2.15.0
	$(ONE_THREAD) .venv-torch-$(VERSION)/bin/python $(PYTEST) -m "not slow"

coverage: .venv/.installed-dev ## run the tests of `make test` and list the lines that they do not run; slower
	$(ONE_THREAD) $(BIN)/coverage run $(PYTEST) -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing

lint: .venv/.installed-dev ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/.installed-dev ## rewrite the code in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: bench-exact bench-planners bench-time bench-resident ## run all benchmarks

bench-exact: .venv/.installed-zoo ## exactness, predicted and measured peak of real models; about an hour
	$(BIN)/python benchmarks/exact.py

bench-planners: .venv/.installed-zoo ## every planner on every model: executed, exact, with the peak it predicts
	$(BIN)/python benchmarks/planners.py

bench-time: .venv/.installed-zoo ## step time against eager
	$(BIN)/python benchmarks/step_time.py

bench-resident: .venv/.installed-zoo ## the saving in the process's maximum resident size
	$(BIN)/python benchmarks/resident.py

bench-plan: .venv/.installed-zoo .venv/.installed-picture ## every planner at seven budgets: overhead, bound, gap, seconds; hours
	$(BIN)/python benchmarks/plan.py

bench-native: .venv/.installed-zoo ## against PyTorch's own memory budget and per-block checkpointing, at equal peaks
	$(BIN)/python benchmarks/native.py

bench-overhead: .venv/.installed-zoo ## predicted overhead against measured step times
	$(BIN)/python benchmarks/overhead.py

bench-scaling: .venv/.installed-picture ## planning seconds against graph size, to 50,000 ops
	$(BIN)/python benchmarks/scaling.py

bench-chain: .venv/.installed-dev ## chains of blocks: LSTM, 1,001 layers, against checkpoint_sequential, cost of a call
	$(BIN)/python benchmarks/chain.py

# A bad row does not end the target: the last command judges the rows of all five.
bench-blocks: .venv/.installed-zoo ## a step of several graphs under one budget: exact, budget kept, cost against the whole graph, first step
	-$(BIN)/python benchmarks/blocks.py
	-$(BIN)/python benchmarks/blocks.py --layerdrop-steps 200 --budgets 60
	-$(BIN)/python benchmarks/blocks.py --compare
	-$(BIN)/python benchmarks/blocks.py --meta
	$(BIN)/python benchmarks/blocks.py --first

bench-start: .venv/.installed-zoo ## seconds of the first planned step against aot_eager's
	$(BIN)/python benchmarks/start.py

bench-distributed: .venv/.installed-dev ## training in several processes: exact, budget kept on every rank, overlap of collectives
	$(BIN)/python benchmarks/distributed.py

bench-inductor: .venv/.installed-zoo ## plans through Inductor beside eager, stock Inductor and its own memory budget; hours, can be resumed
	$(BIN)/python benchmarks/inductor.py

bench-published: .venv/.installed-dev ## seven points on published graphs; GRAPHS=folder
	$(BIN)/python benchmarks/published.py $(if $(GRAPHS),--graphs $(GRAPHS))

bench-same: .venv/.installed-zoo ## the same problems planned by two source trees; OTHER=path/to/src, GRAPHS=folder
	$(BIN)/python benchmarks/same_answers.py --other $(OTHER) $(if $(GRAPHS),--graphs $(GRAPHS))

bench-referee: .venv/.installed-zoo ## one small model per architecture of transformers and timm against eager; hours, can be resumed
	$(BIN)/python benchmarks/referee.py --jobs 2

curves: .venv/.installed-picture ## refresh the pictures of the planners' pages
	$(BIN)/python benchmarks/curves.py

reproduce: .venv/.installed-picture ## the papers' figures beside ours; GRAPHS=folder adds the authors' graph files
	$(BIN)/python -m lowtide reproduce all --out docs/results/reproduce --force $(if $(GRAPHS),--graphs $(GRAPHS))

clean: ## remove the environment and everything generated
	rm -rf .venv .venv-torch-* .browser site out build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

.browser/chromium:
	npm install --silent --no-save --no-package-lock --prefix .browser @sparticuz/chromium@153.0.0
	cd .browser && TMPDIR=$$PWD node --input-type=module -e \
	  "import chromium from '@sparticuz/chromium'; await chromium.executablePath()"
	@test -x $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.venv-torch-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' 'torch==$*'
	@touch $@
