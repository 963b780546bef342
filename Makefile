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
PYTEST = $(BIN)/python -m pytest -n 2

.PHONY: help lab check test test-all notebooks bench book lock oldest clean

help:  ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | \
	    while IFS='|' read -r name text; do printf '  %-15s %s\n' "$$name" "$$text"; done

lab: $(READY)  ## open the course in JupyterLab
	$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_start_here.ipynb

# The library's tests compile thousands of small programs and run each once or twice: to optimise them, and to make them
# by XLA's newer fusion emitters, would take twice as long (the older ones may take for ever where many results share
# their parts: test_collectives.on_all asks for the newer). What runs stored results again, notebooks, what they suggest
# and trials of records, and what compares bits, takes XLA as a reader has it; so does the smoke test of the oldest
# versions. A file stays with one worker, which compiles what its tests share; they start in the order of their names: by
# the number of tests, the last would be those with few and long ones. At most five minutes on two cores: a room's tests
# add no more than 10 s, and the slowest are printed. A property that needs more has a small size here; its full one is
# `long`.
check: export XLA_FLAGS += --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
check: $(READY)  ## check style, walls and library, in five to six minutes: all but what runs stored results again
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "not notebook and not record and not bits and not long"

# Two workers take one notebook after the other, each first cold under nbval, then in a browser that finds what was
# compiled: as far as its first explorer, or, for `test-all`, to its end. What shortens a notebook shortens this. At most
# ten minutes on two cores, once every lesson takes the 20 s that it should.
ONE = tests/test_notebooks.py tests/test_in_browser.py -k "$(ONLY)"
test: $(if $(ONLY),$(READY),check)  ## check, and run every lesson cold and in a browser; ONLY=05_precision: that one alone
	$(PYTEST) --dist loadgroup $(if $(ONLY),$(ONE) -m "not long",-m "(notebook or bits) and not long")

test-all: $(if $(ONLY),$(READY),check)  ## test all: further notebooks, every control in a browser, what is suggested, records, the web site
	$(PYTEST) --dist loadgroup $(if $(ONLY),$(ONE),-m "notebook or record or bits or long")

notebooks: $(READY)  ## format and run the notebooks that changed, or whose library changed, and store their outputs
	$(BIN)/ruff format --quiet notebooks
	$(BIN)/python tools/notebooks.py

bench: $(VENV)/.bench-ready  ## compare with PyTorch and others in some ten minutes; ONLY=cold_start times the notebooks
	$(BIN)/python -m benchmarks $(ONLY)

book: $(READY)  ## make a web site in _book/ whose explorers move without a kernel or a network; needs npm
	$(BIN)/python tools/book.py

lock: .venv-lock/.ready  ## renew requirements.txt from requirements.in; UPGRADE=1 takes the newest versions
	$(subst $(VENV)/,.venv-lock/,$(BIN))/uv pip compile requirements.in --output-file requirements.txt \
	    --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

OLDEST_INSTALL = $(subst $(VENV)/,.venv-lock/,$(BIN))/uv pip install --quiet \
    --python $(subst $(VENV)/,.venv-oldest/,$(BIN))/python
oldest: .venv-lock/.ready  ## smoke-test the library with the oldest versions that pyproject.toml allows
	$(call make_venv,.venv-oldest)
	$(OLDEST_INSTALL) --resolution lowest-direct --editable .
	$(OLDEST_INSTALL) pytest pytest-xdist hypothesis nbformat
	$(subst $(VENV)/,.venv-oldest/,$(BIN))/python -m pytest -n 2 -W ignore::DeprecationWarning @tests/smoke.txt

MADE = .venv .venv-lock .venv-oldest _book jupyter_execute build dist node_modules .pytest_cache .hypothesis .ruff_cache \
    .import_linter_cache .grimp_cache benchmarks/results.json
clean:  ## remove everything that these commands made; downloaded data and begun records stay
	rm -rf $(MADE)
	find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' -o -name .ipynb_checkpoints \) -prune \
	    -exec rm -rf {} +

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
