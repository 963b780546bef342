# `make` alone lists what can be done. Needs Python 3.11 or newer and GNU make; everything else goes into .venv.

PYTHON ?= python3
VENV   := .venv
ifeq ($(OS),Windows_NT)
BIN    := $(VENV)/Scripts
else
BIN    := $(VENV)/bin
endif
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
TWO_AT_A_TIME = -n 2 --dist loadfile
ALONE = tests/test_notebooks.py tests/test_in_browser.py# held to seconds and megabytes

.PHONY: help lab test notebooks bench book lock oldest clean

help:  ## list these commands
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/make \1|\2/' | \
	    while IFS='|' read -r name text; do printf '  %-15s %s\n' "$$name" "$$text"; done

lab: $(READY)  ## open the course in JupyterLab
	$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_start_here.ipynb

test: $(READY)  ## check style, layers, library, notebooks, and the controls in a browser
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

notebooks: $(READY)  ## run the notebooks that changed, or whose library changed, and store their outputs
	$(BIN)/python tools/notebooks.py

bench: $(VENV)/.bench-ready  ## compare speed with PyTorch, a plain loop and plain widgets
	@for file in $$(grep -l __main__ benchmarks/*.py); do \
	    $(BIN)/python -m "benchmarks.$$(basename $$file .py)" || exit 1; done

book: $(READY)  ## make a web site of the notebooks in _book/ that needs no network
	$(BIN)/python tools/book.py

lock: .venv-lock/.ready  ## renew requirements.txt from requirements.in; UPGRADE=1 takes the newest versions
	$(subst $(VENV)/,.venv-lock/,$(BIN))/uv pip compile requirements.in --output-file requirements.txt \
	    --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

OLDEST_INSTALL = $(subst $(VENV)/,.venv-lock/,$(BIN))/uv pip install --quiet \
    --python $(subst $(VENV)/,.venv-oldest/,$(BIN))/python
oldest: .venv-lock/.ready  ## test the library with the oldest versions that pyproject.toml allows
	$(call make_venv,.venv-oldest)
	$(OLDEST_INSTALL) --resolution lowest-direct --editable .
	$(OLDEST_INSTALL) pytest pytest-xdist hypothesis
	$(subst $(VENV)/,.venv-oldest/,$(BIN))/python -m pytest -q $(TWO_AT_A_TIME) -W ignore::DeprecationWarning \
	    $(addprefix tests/test_,$(addsuffix .py,checks statistics data devices models train landscape learning_rate batch_size precision sparsity recompute collectives replay costs figures widgets))

clean:  ## remove everything that these commands made
	rm -rf $(VENV) .venv-lock .venv-oldest _book build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache

$(READY): requirements.txt pyproject.toml
	@echo "Setting up $(VENV); the first time this takes some minutes."
	$(call make_venv,$(VENV))
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps --editable .
	@touch $@

$(VENV)/.bench-ready: $(READY) benchmarks/requirements.txt
	$(PIP) install -r benchmarks/requirements.txt
	@touch $@

.venv-lock/.ready:
	$(call make_venv,.venv-lock)
	$(subst $(VENV)/,.venv-lock/,$(PIP)) install uv
	@touch $@

# ensurepip is what Debian's python3 lacks without the package python3-venv
define make_venv
@$(PYTHON) -c "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
    echo "This course needs Python 3.11 or newer with its venv module; '$(PYTHON)' is not that."; \
    echo "Debian and Ubuntu: apt install python3-venv. Another Python: make PYTHON=/path/to/python3.12 ..."; exit 1; }
@$(PYTHON) -m venv $(1)
endef
