# Two commands: `make demo` and `make test`. Each sets up .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint gaps bench bench-table clean

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

## Train a small Mamba-Transformer on real text in six recipes and write runs/demo/report.html
demo: $(STAMP)
	$(BIN)/quatrain compare bf16 fp8 mxfp4 nvfp4-plain nvfp4 nvfp4-46 --run examples/demo.toml --out runs/demo

## Run the tests
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

## Style, types and layering
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## Loss gaps of every recipe on the demo's model, three seeds (about half an hour; resumes where it stopped)
gaps: $(STAMP)
	$(BIN)/python benchmarks/gaps.py

## CPU speed against fouroversix 1.0.5 (installs the peer in .venv-peer)
bench: $(STAMP)
	$(BIN)/python benchmarks/quantize_cpu.py

## The README's tables and benchmarks/results/summary.json from the newest records
bench-table: $(STAMP)
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf .venv .venv-peer runs .pytest_cache .ruff_cache .mypy_cache
