# make demo      trains a small GPT under fp32, torch.autocast and my_autocast, and compares their bits
# make demo-tune  tunes the GPT in float16, where it overflows, and compares a training under the result with float32
# make test      runs the tests (ARGS="-k cache -x" selects tests; JOBS=0 uses one process)
#                (TORCH_PROMOTE_CHECK_CASTS=1 make test compares every reused cast with a fresh one)
# make test-all  also runs the tests that are marked slow
# make test-installed  runs the tests with install() in force: torch.autocast opens regions of ours
# make coverage  lists the lines of the package, of Python and C++, that no test executes (an extra build, an hour;
#                ARGS=tests/cache for some tests; ARGS=--report for the last run again; ARGS=--json)
# make test-pytorch  runs PyTorch's own autocast tests under stock and with install() in force, and compares their
#                outcomes; PYTORCH= names PyTorch's sources (without it, the command explains how to get them)
# make test-jax  also compares the promotion rules with JAX and ml_dtypes, which it installs
# make test-ecosystem  runs programs of training frameworks under stock autocast and ours, each framework in a separate
#                environment (ARGS=accelerate for one of them; ARGS=--list; not run in CI)
# make sanitize  the tests of the C++ code with AddressSanitizer and UndefinedBehaviorSanitizer in the extension, then with
#                ThreadSanitizer (ARGS=address or ARGS=thread for one; ARGS="thread tests/cache"; not run in CI)
# make soak      makes new modules, policies, rules, ops and threads 20,000 times, and looks for growth of memory and
#                registries (ARGS=--each for each feature by itself; not run in CI)
# make tuned-models  tunes small models of transformers and timm, which it installs, and prints the table of docs/tuning.md
# make parity    PyTorch's op database under stock and ours (make parity ARGS=--quick for a minute's worth)
# make fuzz      random training programs under stock and ours, compared bit for bit (ARGS="--programs 100000 --seed 1",
#                ARGS="--device cuda-stand-in", ARGS=--help)
# make docs      builds README, docs/ and the API reference as a site, in build/site; a warning or a dead link is an error
# make docs-pages  writes the generated parts of docs/promotion.md and docs/promotion_rules.md, and docs/images/
# make lint      ruff, mypy and clang-format
# make bench-instructions  counts the instructions of calls and models under stock and ours (needs valgrind)
# make gpu       on a machine with a GPU: runs the tests that need one, parity and the benchmark; writes docs/gpu.md.
#                Works offline with PYTHON3's PyTorch and pytest (ARGS="--device cuda-stand-in" tries it without a GPU)
# make bench     times regions, ops and models against stock autocast (ARGS="--suite models", ARGS=--help)
#
# Each target first creates a virtual environment, installs PyTorch, and builds the extension if necessary. To use
# another PyTorch: make test TORCH_VERSION=2.15.0 (each version has its own environment).

TORCH_VERSION ?= 2.13.0
DEFAULT_VERSION := 2.13.0
VENV ?= $(if $(filter $(DEFAULT_VERSION),$(TORCH_VERSION)),.venv,.venv-$(TORCH_VERSION))
PYTHON3 ?= python3
ARGS ?=
JOBS ?= 2

# The tests start hundreds of processes. Without files of bytecode, each of them compiles the modules that it imports.
export PYTHONDONTWRITEBYTECODE :=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# The requirements of an extra, without the package and PyTorch.
extra = $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')
SOURCES := setup.py pyproject.toml torch_promote/policy/op_policies.def $(wildcard csrc/*/*)

# The extension is in the source tree, so a build for one PyTorch replaces that for another.
BUILT_WITH := $(shell cat torch_promote/_built_with.json 2>/dev/null)
REBUILD := $(if $(findstring "$(TORCH_VERSION),$(BUILT_WITH)),,force)

.PHONY: demo demo-tune docs docs-pages test test-all test-installed coverage test-pytorch test-jax test-ecosystem \
	tuned-models sanitize soak fuzz parity lint bench bench-instructions gpu build clean force

demo: build
	$(PY) examples/train_gpt.py $(ARGS)

demo-tune: build
	$(PY) examples/tune_gpt.py $(ARGS)

test: build
	$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-all: build
	$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal -m "" $(ARGS)

test-installed: build
	$(PY) -m pytest --installed --numprocesses $(JOBS) --dist worksteal $(ARGS)

coverage: build
	$(PIP) $(call extra,coverage)
	$(PY) tests/line_coverage --jobs $(JOBS) $(ARGS)

test-pytorch: build
	$(PY) tests/pytorch_suite $(PYTORCH) $(ARGS)

test-jax: build
	$(PIP) 'jax[cpu]>=0.10' 'ml_dtypes>=0.5'
	$(PY) -m pytest -rs tests/reference/promotion_rules $(ARGS)

test-ecosystem: build
	$(PY) tests/ecosystem $(ARGS)

sanitize: build
	$(PY) tests/sanitizers $(ARGS)

soak: build
	$(PY) tests/soak $(ARGS)

# The pin prevents torchvision, which timm needs, from installing another PyTorch.
tuned-models: build
	$(PIP) torch==$(TORCH_VERSION) 'transformers>=5' 'timm>=1'
	$(PY) tests/tuned_models $(ARGS)

parity: build
	$(PY) -m torch_promote parity $(ARGS)

fuzz: build
	$(PY) tests/fuzz --jobs $(JOBS) $(ARGS)

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.h csrc/*/*.cpp tests/cuda_stand_in/*.h tests/cuda_stand_in/*.cpp
	$(VENV)/bin/mypy

docs-pages: build
	$(PY) docs/generators/promotion_page.py $(ARGS)
	$(PY) docs/generators/promotion_rules_page.py $(ARGS)
	$(PY) docs/generators/performance_plot.py $(ARGS)

# Reads the sources only: it needs neither PyTorch nor the extension.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)
	@echo 'build/site/index.html (for the search: python3 -m http.server --directory build/site)'

$(VENV)/.docs: pyproject.toml
	$(PYTHON3) -m venv $(VENV)
	$(PIP) $(call extra,docs)
	touch $@

bench: build
	$(PY) -m benchmarks $(ARGS)

bench-instructions: build
	$(PY) -m benchmarks --suite instructions $(ARGS)

gpu:
	$(PYTHON3) tests/gpu $(ARGS)

build: $(VENV)/.built

# Install PyTorch first and separately: other requirements would install another build of it.
$(VENV)/.torch-$(TORCH_VERSION):
	$(PYTHON3) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION)
	$(PIP) 'setuptools>=77' wheel ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch-$(TORCH_VERSION) $(SOURCES) $(REBUILD)
	$(PIP) --no-build-isolation --editable '.[test,lint,demo]'
	touch $@

clean:
	rm -rf .venv .venv-* build out *.egg-info torch_promote/*.so torch_promote/_built_with.json
