# Every target prepares .venv by itself; nothing else has to be installed first but Python 3.11 or 3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For the GPU targets: a Python that imports this project and torch, and for the ONNX Runtime arm onnxruntime-gpu.
GPU_PYTHON ?= python3
# More options of the GPU targets, such as ARGS='--cases bert-base --budget 300'.
ARGS ?=
# Processes of `make test`; 0 is none but pytest's own.
JOBS ?= 2
TESTED := not gpu and not slow and not export and not nightly
# By file, in the order of their folders: files of one long test would else begin last. A process that dies ends the run,
# which names its test: pytest-xdist 3.8 would start another process, and wait for ever at the end (its issue 1378).
PARALLEL = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m "$(TESTED) and not timing"
TIMED = $(BIN)/python -m pytest -n 0 -m "$(TESTED) and timing" $$(grep -rl mark.timing --include='test_*.py' tests)
# How `make lock` solves: setuptools, given on stdin, builds this project without a download of its own.
LOCK := .venv-lock/bin/uv pip compile pyproject.toml - --universal --python-version 3.11 --generate-hashes --upgrade \
	--no-annotate --custom-compile-command 'make lock' --quiet

.PHONY: demo demo-batch test coverage test-all nightly lock latest check docs bench tune-gpu bench-gpu clean

# What the main job needs; the tests need more. Both are locked sets, renewed by `make lock`, and whole: nothing is solved
# here, for pip 23 takes the newest of a package that another wants with an extra, locked or not.
$(VENV)/.installed: pyproject.toml requirements/runtime.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/dev.txt
	touch $@

demo: $(VENV)/.installed  ## the main job on the embedded default: this CPU, SQLite, a zoo model
	mkdir -p .demo
	$(BIN)/relaxtune tune bert-tiny --target llvm --trials 64 --db .demo/tuning.db --out .demo/bert-tiny

demo-batch: $(VENV)/.installed-dev  ## six cells by one plan, on a Ray cluster of this CPU; under three minutes
	$(BIN)/python -m tests.demo_batch

test: $(VENV)/.installed-dev  ## what CI runs; tests that compare times come last, alone
	$(PARALLEL) $(COVER)
	$(TIMED) $(COVER_MORE)

coverage: $(VENV)/.installed-dev  ## these and the slow ones, with the lines that ran; fails below 90 %
	$(MAKE) test TESTED='not gpu and not export and not nightly' COVER='--cov --cov-report=' COVER_MORE='--cov --cov-append --cov-report=term:skip-covered'

test-all: $(VENV)/.installed-dev  ## every test that needs no GPU; the exports need `pip install -e .[export]`
	$(BIN)/python -m pytest -m "not gpu and not nightly"

nightly: $(VENV)/.installed-dev  ## fuzzed calls, random graphs, near misses; with the extra `export`, all exports
	$(BIN)/python -m pytest -m nightly
	@if $(BIN)/python -c 'import torch, transformers' 2>/dev/null; then \
		$(BIN)/python -m tests.export.matrix --every --no-sweeps --precisions --out out/exports.json; \
	else echo "torch and transformers are not installed: the matrix of exports was not run"; fi

lock:  ## the newest versions that pyproject.toml allows, with hashes, for Python 3.11 and 3.12
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --upgrade uv
	echo 'setuptools>=77' | $(LOCK) --output-file requirements/runtime.txt
	echo 'setuptools>=77' | $(LOCK) --output-file requirements/dev.txt --extra dev --extra cuda \
		--constraint requirements/runtime.txt

latest:  ## the tests on the newest of everything, upper bounds aside; their warnings are no errors
	$(PYTHON) -m venv --clear .venv-latest
	.venv-latest/bin/python requirements/newest.py > .venv-latest/newest.txt
	.venv-latest/bin/python -m pip install --quiet --upgrade -r .venv-latest/newest.txt
	.venv-latest/bin/python -m pip install --quiet --no-deps --editable .
	.venv-latest/bin/python -m pytest -W default -m "not gpu and not slow and not export and not nightly"

check: $(VENV)/.installed-dev  ## lint, format, strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev  ## the pages and the reference as a site in out/docs; a broken link fails
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs . out/docs

bench: $(VENV)/.installed-dev  ## side-by-side runs on this CPU; raw values under benchmarks/results
	$(BIN)/python -m benchmarks.whole_models.bench_cpu

tune-gpu:  ## the artifacts of bench-gpu, tuned on this machine's GPU into out/gpu, two layers standing for all
	$(GPU_PYTHON) -m benchmarks.whole_models.tune_gpu_cases --tune-layers 2 --rerank 6 --jobs 4 $(ARGS)

bench-gpu:  ## whole models beside torch and ONNX Runtime on one GPU; raw values under benchmarks/results
	$(GPU_PYTHON) -m benchmarks.whole_models.bench_gpu $(ARGS)

clean:
	rm -rf .demo build *.egg-info
