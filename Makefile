.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON := .venv/bin/python
ORBITSERVE := .venv/bin/orbitserve
NAME ?= list

.PHONY: help setup tools demo demo-rag serve test check lint types format doctor bench figures checkpoints tiny-checkpoint lock clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## Start the service, ask about pages in two orders, print what was reused [MODEL=smollm2] [KEEP=1]
	$(ORBITSERVE) demo $(if $(MODEL),--model "$(MODEL)") $(if $(KEEP),--keep) $(ARGS)

demo-rag: setup ## Start the service, find pages of PDFs in a vector store, cite and link them [FOLDER=your/files] [MODEL=smollm2] [KEEP=1]
	$(ORBITSERVE) demo rag $(if $(MODEL),--model "$(MODEL)") $(if $(FOLDER),--folder "$(FOLDER)") $(if $(KEEP),--keep) $(ARGS)

serve: setup ## Serve a model: make serve MODEL=directory|smollm2|ORGANISATION/NAME, or CONFIG=file, or both [ARGS="..."]
	@test -n "$(MODEL)$(CONFIG)" || { echo "which model? make serve MODEL=directory, or CONFIG=file that names one"; exit 2; }
	$(ORBITSERVE) serve $(if $(MODEL),"$(MODEL)") $(if $(CONFIG),--config "$(CONFIG)") $(ARGS)

test: tools tiny-checkpoint ## Run the tests but slow ones, or some: make test [ARGS="tests/unit -k word", or ARGS="-m slow"]
ifdef ARGS
	$(PYTHON) -m pytest $(ARGS)
else  # side by side, but services, which want the machine for themselves
	$(PYTHON) -m pytest tests/unit -n logical --dist loadfile
	$(PYTHON) -m pytest tests/integration -n 2 --dist loadfile -m "not slow and not cluster"
	$(PYTHON) -m pytest tests/integration -m "cluster and not slow"
	$(PYTHON) -m pytest tests/end_to_end tests/cluster
endif

check: lint types test ## What CI runs: lint, types and tests

lint: tools ## Check style with ruff
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

types: tools ## Check types with mypy (strict)
	$(PYTHON) -m mypy

format: tools ## Rewrite the sources in the project's style
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

doctor: setup ## Check this machine and say what to do about each problem
	$(ORBITSERVE) doctor $(ARGS)

bench: setup ## Run a benchmark: make bench NAME=ttft [ARGS="--quick --json out.json"]; without NAME, list them
	$(PYTHON) -m tests.benchmarks $(NAME) $(ARGS)

figures: setup ## Write the figures and tables in the documents anew, from records and code
	$(PYTHON) -m tests.benchmarks.render

checkpoints: setup ## Write the tests' random checkpoints to .orbitserve/checkpoints
	@$(PYTHON) -m infra.checkpoints all

lock: tools ## Write the lock files of this version of Python anew, from the packages that are installed in .venv
	$(PYTHON) -m infra.lock

clean: ## Remove the environment and all that it makes anew; what was stored or trained in .orbitserve stays, but the demo's
	rm -rf .venv .orbitserve/{checkpoints,s3-server,demo} .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: ## Make or refresh .venv; the other targets do it by themselves
	@infra/bootstrap.sh

tools: ## The same, with the tools of tests, types and style
	@infra/bootstrap.sh dev

tiny-checkpoint: setup
	@$(PYTHON) -m infra.checkpoints qwen2_5_vl-tiny >/dev/null
