# make demo and make test work on a machine with Python 3.11, pip, make and git.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Tests run in so many processes, each with its own PostgreSQL server and some with Ray clusters.
# Files in their order: tests/e2e takes longest and is first.
PROCESSES ?= 2

BENCHMARKS := first_path serving spectra clipping bounds series convolutions step_profile training evaluation

.PHONY: install demo serve test check bench docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	@exec $(BIN)/ttsv demo examples/quickstart.json

serve: $(INSTALLED)
	@exec $(BIN)/ttsv serve

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu" --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv ttsv-data build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
