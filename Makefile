# make demo: from a real model file to a decision with proof.   make test: every test.
# Both do their own set-up: a virtual environment in .venv, the native build, the models.

PYTHON ?= python3
VENV ?= .venv
# The torch build to use. On Linux the default index carries a CUDA build of several GB; point
# TORCH at a CPU build if you have one, e.g. TORCH=/path/to/torch-2.13.0+cpu.whl
TORCH ?= torch==2.13.0
MODEL ?= gemma-3-270m
OUT ?= demo-out
BUDGET ?= 5m

BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.h' 2>/dev/null)
CXX_FILES = $(shell find native -name '*.cpp' -o -name '*.h')

.PHONY: demo test lint format bench bench-cuda wheel setup models clean

demo: setup
	$(BIN)/kvproof decide $(MODEL) --budget $(BUDGET) --out $(OUT)
	@echo
	@echo "Open $(OUT)/report.html in a browser. The same as text: $(OUT)/report.md"

test: setup models
	$(BIN)/pytest tests

# Python packages, then kvproof itself with its native kernels (rebuilt when a native source changes).
setup: $(VENV)/.kvproof

$(VENV)/.kvproof: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the other packages, then building the native kernels: several minutes, in silence."
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[transformers,llamacpp,dev]"
	touch $@

models: setup
	$(BIN)/kvproof fetch gemma-3-270m
	$(BIN)/kvproof fetch smollm2-135m

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: setup
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/clang-format -i $(CXX_FILES)

bench: setup
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/prefill.py
	$(BIN)/python benchmarks/startup.py

# On a machine with an NVIDIA GPU, whose torch has CUDA.
bench-cuda: setup
	$(BIN)/python benchmarks/attention_cuda.py

# A wheel, installed into an empty environment and used there.
wheel: setup
	rm -rf dist build/wheel-venv
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet dist/*.whl
	cd build/wheel-venv && bin/kvproof doctor && bin/kvproof formats && bin/kvproof verify --backend cpu --check shipped --check row --check fused

clean:
	rm -rf build dist $(VENV)/.kvproof
