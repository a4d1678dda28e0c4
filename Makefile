# make train and make test are the whole set-up: what is missing is installed, what is there is used. `make` lists the targets.
#   TORCH=...   another torch requirement (default: the CPU build of 2.13.0)      PYTHON=...  the interpreter that makes .venv
#   ARGS=...    further options of the command a target runs                     JOBS=...    parallel jobs (default: all cores)
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Half as many again as jobs, 8 at most: tests that start ranks wait much of the time.
WORKERS ?= $(shell n=$$(($(JOBS) * 3 / 2)); echo $$((n < 8 ? n : 8)))
FUZZ_SECONDS ?= 60
CORE ?= core
export PYTHON
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

SETUP = $(PYTHON) tools/setup/setup.py
# The environment's own programs; read when a recipe runs, after the set-up has chosen the environment.
PY = $$(cat build/python-path)
BIN = $$(dirname $$(cat build/python-path))

.DEFAULT_GOAL := help
.PHONY: help build train test core-test asan-test fuzz bench zoo soak lint tidy docs check-install version clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## install what is missing and build the interlace command
	@sh tools/setup/system.sh python cxx venv headers
	@$(SETUP) build
	@echo "the command is $(BIN)/interlace"

train: build  ## the main job: train a Llama on two ranks on this machine
	@$(BIN)/interlace train --model llama-10m --ranks 2 --save runs/llama-10m $(ARGS)

test: $(CORE)-test  ## all tests; CORE=asan has those of the core rooms under sanitizers
	@sh tools/setup/system.sh headers
	@$(SETUP) test
	@$(PY) -m pytest -m "not soak" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10 $(ARGS)
	@INTERLACE_DEVICE=soft $(PY) -m pytest -m "not soak" -n $(JOBS) --dist loadfile tests/regress tests/python/test_accelerator_faults.py tests/python/test_accelerator_lost.py tests/python/test_arena_accelerator.py tests/python/test_cubins_accelerator.py tests/python/test_device_defaults.py tests/python/test_device_graphs.py tests/python/test_kernels_accelerator.py tests/python/test_paced.py

core-test:  ## build and test the C++ rooms that need no torch
	@sh tools/setup/system.sh python cxx venv gtest
	@$(SETUP) tools
	@export PATH="$(BIN):$$PATH" && cmake --preset core >build/core.log || { cat build/core.log; exit 1; } \
	  && cmake --build --preset core && ctest --preset core

asan-test:  ## the same under address and undefined-behaviour sanitizers (clang)
	@sh tools/setup/system.sh python cxx venv gtest clang
	@$(SETUP) tools
	@export PATH="$(BIN):$$PATH" && cmake --preset asan >build/asan.log || { cat build/asan.log; exit 1; } \
	  && cmake --build --preset asan && ctest --preset asan

fuzz:  ## fuzz every reader for FUZZ_SECONDS (default 60)
	@sh tools/setup/system.sh python cxx venv gtest clang
	@$(SETUP) tools
	@export PATH="$(BIN):$$PATH" && cmake --preset asan >build/asan.log || { cat build/asan.log; exit 1; } \
	  && cmake --build --preset fuzz && sh tools/setup/fuzz.sh $(FUZZ_SECONDS)

bench: build  ## measure against PyTorch, alternating in the same processes; figures go to out/bench.json
	@$(SETUP) test
	@mkdir -p out && rm -f out/bench.json out/prediction.json
	@for case in one_rank two_ranks executor compile_time sharded_memory simulator; do \
	  echo "» $$case"; $(PY) bench/$$case.py --json out/bench.json $(ARGS) || exit 1; done
	@echo "» prediction" && $(PY) bench/prediction.py --json out/prediction.json $(ARGS)
	@echo "» peers" && $(PY) bench/peers.py --rounds 3 --block 1 $$([ $$(id -u) = 0 ] && echo --mbit 500) --json out/bench.json $(ARGS)

zoo: build  ## train public model classes, one rank against eager, two against one process; a table of what passes and what does not
	@$(SETUP) test
	@$(PY) tests/python/zoo_models.py $(ARGS)

soak: build  ## the long runs of tests that `make test` samples, and forty minutes of fuzzing
	@$(SETUP) test
	@$(PY) -m pytest -m soak $(ARGS)
	@INTERLACE_SOAK=1 INTERLACE_DEVICE=soft $(PY) -m pytest -m "not soak" -n $(JOBS) --dist loadfile $(ARGS)
	@INTERLACE_SOAK=1 INTERLACE_DEVICE=soft $(PY) -m pytest -m soak -n $(JOBS) --dist loadfile tests/regress tests/python/test_accelerator_faults.py tests/python/test_trainer_bits.py tests/python/test_parity.py tests/python/test_hybrid.py $(ARGS)
	@INTERLACE_SOAK=1 $(MAKE) --no-print-directory core-test
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=2400

lint: build  ## walls between rooms, lines, ruff, mypy, and clang-format where it is installed
	@$(PY) tools/lint/walls.py
	@$(PY) tools/lint/lines.py
	@$(SETUP) dev
	@$(BIN)/ruff check python tests bench tools examples && $(BIN)/mypy
	@if command -v clang-format >/dev/null; then \
	  find src tools -name '*.h' -o -name '*.cc' | xargs clang-format --dry-run --Werror; fi

tidy:  ## clang-tidy over the core rooms; any finding fails
	@sh tools/setup/system.sh python cxx venv tidy
	@$(SETUP) tools
	@export PATH="$(BIN):$$PATH" && cmake --preset tidy >build/tidy.log || { cat build/tidy.log; exit 1; }
	@sed -n 's/^ *"file": "\(.*\)",*$$/\1/p' build/tidy/compile_commands.json | xargs -P $(JOBS) -n 1 clang-tidy -quiet -p build/tidy

docs:  ## docs/reference.md, the README's picture, and the site of all documents in out/site
	@$(SETUP) test
	@$(PY) tools/docs/reference.py && $(PY) tools/docs/picture.py
	@$(PY) -m mkdocs build -q && echo "the site is out/site/index.html"

check-install:  ## pip install in fresh environments, with torch and without
	@$(SETUP) build
	@$(PY) tools/setup/check_install.py $(ARGS)

version:  ## fail when the tag of this commit is not the version
	@tag=$$(git describe --tags --exact-match 2>/dev/null || echo none); \
	  version=v$$(sed -n 's/__version__ = "\(.*\)"/\1/p' python/interlace/version.py); \
	  [ "$$tag" = none ] || [ "$$tag" = "$$version" ] || { echo "error: the tag is $$tag, the version $$version" >&2; exit 1; }; \
	  echo "$$version"

clean:  ## remove what was built and measured (not .venv, not runs)
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache
