# make demo and make test work on a machine with Python 3.11, pip, make and git.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Tests run in so many processes, each with its own PostgreSQL server and some with Ray clusters: two more than there are
# cores, as those that wait leave two cores a tenth idle with three, and at most four. Files in their order, which
# tests/conftest.py gives: those that take longest are first.
PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 2 ? 4 : n + 2)))
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Else each of the hundreds of processes that tests start would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

BENCHMARKS := first_path serving pages scheduling reporting spectra clipping bounds series convolutions step_profile training evaluation trajectories gpu

.PHONY: install demo serve test test-quick test-deep mutants chaos chaos-beside check bench docs clean

install: $(INSTALLED)

# Python compiles what it imports at its first start; to compile all that comes with torch and Ray takes a minute. The pip
# of older Pythons takes another minute to unpack them; the newer one passes on that an editable installation is one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=26'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	@exec $(BIN)/ttsv demo examples/quickstart.json

serve: $(INSTALLED)
	@exec $(BIN)/ttsv serve

test: $(INSTALLED)
	$(PYTEST) -m "not gpu and not deep" $(ARGS)

# Before each commit: a part of every room, without processes of its own, databases other than SQLite, or training.
test-quick: export HYPOTHESIS_PROFILE = quick
test-quick: $(INSTALLED)
	$(PYTEST) -m "not (gpu or deep or slow or machinery)" --ignore tests/browser $(ARGS)

# Before a release, or after a change to the mathematics or to what runs in processes: twice as many examples as were
# ever drawn, every parameter, and each way in which a process can die, by itself.
test-deep: export HYPOTHESIS_PROFILE = deep
test-deep: export TTSV_FUZZ_CASES = 3000
test-deep: $(INSTALLED)
	$(PYTEST) -m "not gpu" --timeout 3600 $(ARGS)

# make mutants MODULE=service/leaderboards/leaderboard.py: which changes to the module do its tests not see?
# A copy of the tree is changed, and never the tree. TESTS are those of the same name, or where there are none all of the
# room, unless others are given.
MODULE ?= ttsv/spectral/clipping.py
TESTS ?= $(or $(wildcard tests/$(dir $(MODULE))test_$(notdir $(MODULE))),tests/$(patsubst %/,%,$(dir $(MODULE))))
MUTANTS := build/mutants/$(basename $(subst /,-,$(MODULE)))

mutants: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutation]'
	mkdir -p $(MUTANTS)
	git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C $(MUTANTS)
	sed -e 's|^only_mutate = .*|only_mutate = ["$(MODULE)"]|' \
	    -e 's|^\(pytest_add_cli_args_test_selection = \).*|\1[$(foreach path,$(TESTS),"$(path)",)]|' \
	    pyproject.toml > $(MUTANTS)/pyproject.toml
	cd $(MUTANTS) && $(abspath $(BIN))/mutmut run --max-children $(PROCESSES) && $(abspath $(BIN))/mutmut results

# Everything that can die does, on both databases, three zombies wake up, and a machine without a shared folder dies twice;
# ARGS="--every 1 --seed 7" for more of it, or again.
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --database sqlite --seconds 60 $(ARGS)
	$(BIN)/python -m tests.chaos --database postgresql --seconds 60 $(ARGS)
	$(BIN)/python -m tests.chaos --database sqlite --only freeze --count 3 $(ARGS)
	$(BIN)/python -m tests.chaos --database postgresql --unshared --only node --count 2 $(ARGS)

# Five minutes of rarer mishaps, which leave the processor to others. In half of them whoever comes first to a fault
# point is killed there besides; the other half has, where a machine can have another name and other mounts, a second node
# that does not see the data folder.
chaos-beside: CALM = --seconds 150 --every 20 --calm --peace 600
chaos-beside: UNSHARED = $(shell unshare --mount --uts true 2>/dev/null && echo --unshared)
chaos-beside: $(INSTALLED)
	$(BIN)/python -m tests.chaos --database sqlite $(CALM) --faults $(ARGS)
	$(BIN)/python -m tests.chaos --database postgresql $(CALM) $(UNSHARED) $(ARGS)

# The last collects the tests, as each process of `make test` will: in a fresh clone all of them would compile them anew.
check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@collected=$$($(BIN)/python -m pytest --collect-only --quiet --quiet 2>&1) || { echo "$$collected"; exit 1; }

bench: $(INSTALLED)
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv ttsv-data build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
