# Needs only make and Python >= 3.10: every target makes .venv and installs what it needs by itself.
#   make PYTHON=python3.12 test     another interpreter for .venv
#   make test ARGS="-k schedule"    more arguments for the command of the target

PYTHON ?= python3
ARGS ?=
NAME ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# A file's tests share what they have computed, so they stay together. Each worker imports torch,
# Lightning and all tests, and so do two processes of which its ranks are forked: 20 s of a core.
# A third worker uses the cores while ranks wait for each other.
PARALLEL := -n 3 --dist loadfile
# Tests start many processes: each would compile this package and the tests again.
test test-all: export PYTHONDONTWRITEBYTECODE :=
# Of properties, `test` draws half as many examples.
test-all: export DLRES_ALL_EXAMPLES := 1
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all lint bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(VENV)/.installed-runtime ## train a small GPT on three CPU processes of unlike speed
	@$(BIN)/dlres demo $(ARGS)

test: $(VENV)/.installed-test ## run the tests
	@$(BIN)/python -m pytest -q --durations=10 $(PARALLEL) $(ARGS)

test-all: $(VENV)/.installed-test ## run the tests, the exhaustive ones too
	@$(BIN)/python -m pytest -q --durations=10 $(PARALLEL) -m "not gpu" $(ARGS)

lint: $(VENV)/.installed-dev ## run ruff (rules and format) and mypy
	@status=0; \
	for check in "ruff check ." "ruff format --check ." "mypy"; do \
		echo "$$check"; $(BIN)/python -m $$check || status=1; \
	done; exit $$status

bench: $(if $(NAME),$(VENV)/.installed-test) $(if $(filter prefetch,$(NAME)),$(VENV)/.installed-peers) $(if $(filter capture,$(NAME)),$(VENV)/.installed-models) $(if $(filter captured_speed,$(NAME)),$(VENV)/.installed-transformers) ## make bench NAME=...: run one benchmark; without NAME: list them
ifeq ($(NAME),)
	@echo "make bench NAME=..., where NAME is one of:"
	@found=; for file in benchmarks/*.py; do \
		grep -q '__main__' "$$file" || continue; \
		found=yes; echo "  $$(basename "$$file" .py)"; \
	done; [ -n "$$found" ] || echo "  (none yet)"
else
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)
endif

clean: ## remove caches and build output; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c "" 2>/dev/null || { \
		echo "'$(PYTHON)' does not run here. Install Python >= 3.10, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
		echo "Python >= 3.10 is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c "import venv, ensurepip" 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# One stamp per set of packages, renewed when a range or a pin changes. A larger set contains the smaller ones.
$(VENV)/.installed-runtime: $(PINS) | $(BIN)/python
	@echo "Installing into $(VENV) (once; torch is a large download) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(PINS) | $(BIN)/python
	@echo "Installing into $(VENV), with what the tests need (once; torch is a large download) ..."
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.installed-runtime $@

# Peers that need other versions than we do, in an environment of their own.
$(VENV)/.installed-peers: benchmarks/peers.txt | $(BIN)/python
	@echo "Installing peers into $(VENV)/peers (once; torch is a large download) ..."
	@$(BIN)/python -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

# transformers alone: it imports a torchvision that is installed, and not each build of torchvision imports beside each of torch.
$(VENV)/.installed-transformers: benchmarks/transformers.txt $(VENV)/.installed-test
	@echo "Installing transformers into $(VENV) (once) ..."
	@$(PIP) -r benchmarks/transformers.txt
	@touch $@

# Libraries of models. torchvision needs the pinned torch, so they are installed with the pins.
$(VENV)/.installed-models: benchmarks/models.txt benchmarks/transformers.txt $(VENV)/.installed-test
	@echo "Installing libraries of models into $(VENV) (once) ..."
	@$(PIP) -r benchmarks/models.txt
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	@echo "Installing into $(VENV), with the development tools (once; torch is a large download) ..."
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed-runtime $(VENV)/.installed-test $@
