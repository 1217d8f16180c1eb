# The two commands of the README are `make demo` and `make test`; the rest is for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# on a terminal pip shows what it is fetching
QUIET := $(shell test -t 2 || echo --quiet)
# one thread a process: two threads on a busy machine cost milliseconds per operation
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test ranks proof mutants weights lint types imports docs check profile selfcheck clean

$(BIN)/.core: pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch, transformers and what they need (1.2 GB on disk, a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(QUIET) -c constraints.txt -e .
	touch $@

$(BIN)/.dev: $(BIN)/.core
	@echo "adding the developers' tools"
	$(PIP) install $(QUIET) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(BIN)/.core  ## answer a prompt with the embedded default pair, streaming, with a summary
	$(BIN)/specdiff generate --chat -n 128 --compare "A bakery packs rolls in bags of 6. It baked 150 rolls and sold 17 bags. How many rolls are left? Explain step by step."

test: $(BIN)/.dev  ## the default suite: offline, CPU
	$(BIN)/python -m pytest -n 2

ranks: $(BIN)/.dev  ## tensor parallelism: two gloo ranks under torchrun
	$(BIN)/python -m pytest -m slow tests/parity/test_tensor_parallel.py

weights: $(BIN)/.dev  ## the tests on the default target's real weights
	$(BIN)/specdiff models pull smollm2-135m
	$(BIN)/python -m pytest -m weights

proof: $(BIN)/.dev  ## the whole statistical matrix; goes on from where it was with SPECDIFF_LAW_RECORD=law.jsonl
	$(BIN)/python -m pytest -n 2 -m 'proof or slow'

mutants: $(BIN)/.dev  ## plant every known fault; print the kill rate
	$(BIN)/python scripts/mutants.py

selfcheck: $(BIN)/.dev  ## the rows of the reliability table, with figures
	$(BIN)/python scripts/selfcheck.py

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(BIN)/.dev
	$(BIN)/lint-imports

docs: $(BIN)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types imports test docs

clean:
	rm -rf $(VENV) build dist site
