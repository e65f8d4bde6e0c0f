# Each target sets up .venv when it is missing; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two processes run tests: chapters and the site, which wait much, beside everything else; last and
# alone, what must not be disturbed (`tests/conftest.py`). `make test BESIDE=` has one.
BESIDE ?= -n 2

.PHONY: help book print test test-fast check types bench gpu lab images clean

help:
	@echo "make book       execute the notebooks on this machine's ranks and render the site"
	@echo "make print      the book as a PDF and an ePub of each language, in _build/print"
	@echo "make test       pass every test"
	@echo "make test-fast  pass those that need one process only, in a minute"
	@echo "make check      style, layout, spelling, and which package may import which"
	@echo "make types      every public name has a type; half a minute"
	@echo "make bench      our kernels beside the production engines"
	@echo "make gpu        on a machine with a GPU: its tests, chapters and benchmark, recorded"
	@echo "make lab        JupyterLab on the notebooks"
	@echo "make images     draw the pictures"
	@echo "make clean      remove what was built (not .venv)"

# Also runs where the Python is a very old one.
suitable = $(1) -c 'import sys; v = sys.version_info[:2]; \
	(3, 11) <= v <= (3, 13) or sys.exit("Naranhi needs Python 3.11 to 3.13, and $(1) is %d.%d; name another: make PYTHON=python3.12" % v)'

$(READY): requirements.txt pyproject.toml
	@$(call suitable,$(PYTHON))
	@echo "Setting up .venv: 2.5 GB, or several GB more with PyTorch for CUDA; some minutes, once"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

book: $(READY)
	@$(BIN)/python book/build.py

# By Chromium: the system's, or the one that .venv/bin/playwright install chromium fetches.
print: $(READY)
	@$(BIN)/python book/build.py --print

test: $(READY)
	@echo "Testing: the kernels, real ranks, the notebooks, the site in a browser; half an hour or more"
	@$(MAKE) --no-print-directory check
	@$(BIN)/python -m pytest tests $(BESIDE)

# Folders without such a test are not looked into, which takes seconds.
test-fast: check
	@$(BIN)/python -m pytest tests $(BESIDE) -m "not (ranks or processes or notebooks or browser or slurm or slow)" \
	-p no:nbmake $(foreach folder,benchmarks cluster notebooks recipes site train world,--ignore=tests/$(folder))

# What is read, not run: style, layout, spelling, and which package may import which.
check: $(READY)
	@$(BIN)/ruff check --quiet src tests book images
	@$(BIN)/ruff format --check --quiet src tests book images
	@$(BIN)/lint-imports --no-logo > /dev/null || $(BIN)/lint-imports --no-logo
	@$(BIN)/codespell

# Every public name has a type. It looks for the package as the first python in PATH finds it.
types: $(READY)
	@told=$$(PATH="$(CURDIR)/$(BIN):$$PATH" basedpyright --verifytypes naranhi --ignoreexternal 2>&1) \
	|| { echo "$$told" | grep -B 1 error; exit 1; }

bench: $(READY)
	@$(BIN)/python -m tests.benchmarks

# Needs no network: it uses .venv where that is ready, else PYTHON with the torch that it has, and
# the packages in WHEELS, a folder of wheels.
MINUTES ?= 9
GPU_PYTHON = $(if $(and $(wildcard $(READY)),$(filter-out command,$(firstword $(origin PYTHON)))),$(BIN)/python,$(PYTHON))
gpu:
	@$(call suitable,$(GPU_PYTHON))
ifneq ($(WHEELS),)
	@$(GPU_PYTHON) -m pip install --disable-pip-version-check --quiet --no-index --no-deps --upgrade \
	--target _build/wheels $(WHEELS)/*.whl
endif
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/_build/wheels:$$PYTHONPATH" $(GPU_PYTHON) book/gpu.py --minutes $(MINUTES) \
	$(if $(OUT),--into "$(OUT)") $(if $(RESUME),--resume) $(if $(ONLY),--only $(ONLY)) $(if $(COMMIT),--commit $(COMMIT))

# jupyterlab-myst renders roles and directives there. It is not in requirements.txt: no chapter that
# is executed depends on it.
LAB := .venv/.lab
$(LAB): $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet jupyterlab-myst==2.7.0
	@touch $@

lab: $(LAB)
	@$(BIN)/jupyter lab notebooks

images: $(READY)
	@$(BIN)/python images/draw.py

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
