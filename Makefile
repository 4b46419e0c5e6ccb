# make demo   installs, prepares a corpus, trains the demo model, writes a sample (a few minutes on two cores)
# make test   the tests; make test-all adds the slow ones
# make check  lint, types, and the rules of tests/rules
# make docs   the documentation as a site in build/site; a warning or a dead link is an error
# make docs-regions  what commands print on the pages, made anew
# make bench  the benchmarks
# make plan-accuracy RUNS=runs.json  the planner fitted on published runs and judged: docs/plan-accuracy.md

VENV := .venv
PEER := .venv-peer
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell $(name) -c '$(SUITABLE)' 2>/dev/null && echo $(name))))

.PHONY: install demo test test-all check docs docs-regions bench plan-accuracy clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (MindSpore is a download of 0.8 GB)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev,docs]'
	@touch $@

corpora/stdlib/manifest.json: | $(STAMP)
	$(BIN)/amt data prepare --corpus python-stdlib --out corpora/stdlib --vocab-size 2048

demo: $(STAMP) corpora/stdlib/manifest.json
	$(BIN)/amt train examples/demo.yaml

# Tests of one process run on two cores at once, the longest files first; those that start ranks, or whose deadlines a
# busy machine would miss, by themselves.
BESIDE := $(patsubst %,tests/faults/test_%.py,kill_train resume checkpoint_kill checkpoint_damage checkpoint_pieces \
    checkpoint_full_disk whole_files hostile_hosts hostile_names launch_mistakes malformed profile_fuzz)
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder $(BESIDE) tests/unit tests/rules
ALONE := $(BESIDE:%=--ignore=%) tests/parity tests/faults

test: $(STAMP)
	$(BIN)/python -m pytest $(TOGETHER)
	$(BIN)/python -m pytest $(ALONE)

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "" $(TOGETHER)
	$(BIN)/python -m pytest -m "" $(ALONE)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/rules

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-regions: $(STAMP)
	$(BIN)/python -m scripts.docs_regions --slow

# The peers of the benchmarks live in an environment of their own: torch is no dependency of the project.
$(PEER)/.installed: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

bench: $(STAMP) $(PEER)/.installed
	PEER_PYTHON=$(PEER)/bin/python $(BIN)/python -m benchmarks

plan-accuracy: $(STAMP)
	@test -n "$(RUNS)" || { echo "Name the file of published runs: make plan-accuracy RUNS=runs.json" >&2; exit 2; }
	$(BIN)/python -m scripts.plan_accuracy $(RUNS)

clean:
	rm -rf $(VENV) $(PEER) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
