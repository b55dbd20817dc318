# make demo      trains a small GPT under fp32, torch.autocast and my_autocast, and compares their bits
# make demo-tune  tunes the GPT in float16, where it overflows, and compares a training under the result with float32
# make test      runs the tests (make test ARGS="-k cache -x" for some of them; JOBS=0 for one process)
#                (TORCH_PROMOTE_CHECK_CASTS=1 make test compares every reused cast with a fresh one)
# make test-all  runs the tests that are marked slow as well
# make test-installed  runs the tests with install() in force: torch.autocast opens regions of ours
# make test-pytorch  runs PyTorch's own tests of autocast under stock and with install() in force, and compares how they
#                end; PYTORCH= names PyTorch's sources (without it, the command says how to get them)
# make test-jax  compares the promotion rules with JAX and ml_dtypes as well, which it installs
# make test-ecosystem  runs programs of training frameworks under stock autocast and ours, each framework in an
#                environment of its own (make test-ecosystem ARGS=accelerate for one; ARGS=--list; not run in CI)
# make tuned-models  tunes small models of transformers and timm, which it installs, and prints the table of docs/tuning.md
# make parity    PyTorch's op database under stock and ours (make parity ARGS=--quick for a minute's worth)
# make docs-pages  writes the generated parts of docs/promotion.md and docs/promotion_rules.md
# make lint      ruff, mypy and clang-format
# make bench-instructions  counts the instructions of calls and models under stock and ours (needs valgrind)
# make gpu       on a machine with a GPU: the tests that need one, parity and the benchmark; writes docs/gpu.md. Needs no
#                network: it uses PYTHON3's PyTorch and pytest (ARGS="--device cuda-stand-in" tries it without a GPU)
# make bench     times regions, ops and models against stock autocast (ARGS="--plot bench.png" for a picture)
#
# Each target sets up what it needs: a virtual environment, PyTorch, and the extension built against it. For another
# PyTorch: make test TORCH_VERSION=2.15.0 (an environment for each version).

TORCH_VERSION ?= 2.13.0
DEFAULT_VERSION := 2.13.0
VENV ?= $(if $(filter $(DEFAULT_VERSION),$(TORCH_VERSION)),.venv,.venv-$(TORCH_VERSION))
PYTHON3 ?= python3
ARGS ?=
JOBS ?= 2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml torch_promote/policy/op_policies.def $(wildcard csrc/*/*)

# The extension lies in the source tree, where one PyTorch's build replaces another's.
BUILT_WITH := $(shell cat torch_promote/_built_with.json 2>/dev/null)
REBUILD := $(if $(findstring "$(TORCH_VERSION),$(BUILT_WITH)),,force)

.PHONY: demo demo-tune docs-pages test test-all test-installed test-pytorch test-jax test-ecosystem tuned-models parity \
	lint bench bench-instructions gpu build clean force

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

test-pytorch: build
	$(PY) tests/pytorch_suite $(PYTORCH) $(ARGS)

test-jax: build
	$(PIP) 'jax[cpu]>=0.10' 'ml_dtypes>=0.5'
	$(PY) -m pytest -rs tests/reference/promotion_rules $(ARGS)

test-ecosystem: build
	$(PY) tests/ecosystem $(ARGS)

# The pin keeps torchvision, which timm needs, from bringing another PyTorch.
tuned-models: build
	$(PIP) torch==$(TORCH_VERSION) 'transformers>=5' 'timm>=1'
	$(PY) tests/tuned_models $(ARGS)

parity: build
	$(PY) -m torch_promote parity $(ARGS)

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror csrc/*/*.h csrc/*/*.cpp tests/cuda_stand_in/*.h tests/cuda_stand_in/*.cpp
	$(VENV)/bin/mypy

docs-pages: build
	$(PY) docs/generators/promotion_page.py $(ARGS)
	$(PY) docs/generators/promotion_rules_page.py $(ARGS)

bench: build
	$(PY) -m torch_promote bench $(ARGS)

bench-instructions: build
	$(PY) -m torch_promote bench --suite instructions $(ARGS)

gpu:
	$(PYTHON3) tests/gpu $(ARGS)

build: $(VENV)/.built

# PyTorch first and by itself: an open range would bring another build of it.
$(VENV)/.torch-$(TORCH_VERSION):
	$(PYTHON3) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION)
	$(PIP) 'setuptools>=64' wheel ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch-$(TORCH_VERSION) $(SOURCES) $(REBUILD)
	$(PIP) --no-build-isolation --editable '.[test,lint,demo]'
	touch $@

clean:
	rm -rf .venv .venv-* build out *.egg-info torch_promote/*.so torch_promote/_built_with.json
