# The two commands: `make mt5` trains the example, `make test` runs the tests. Each sets up what it needs.

N ?= 2
VENV ?= .venv
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# ninja, pyright's Node.js and the composer launcher are found on the PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
# DeepSpeed compiles its CPU optimizer and collectives at first use, for a minute or two: once for each environment.
EXTENSIONS := $(CURDIR)/.torch_extensions
export TORCH_EXTENSIONS_DIR ?= $(EXTENSIONS)
export TORCHINDUCTOR_COMPILE_THREADS ?= 1
# Ranks that find no bytecode compile every module anew at every start.
unexport PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV PYTHONHOME
ifeq ($(shell nvidia-smi -L 2>/dev/null; ls /dev/kfd 2>/dev/null),)
export DS_ACCELERATOR ?= cpu
endif

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
HEADERS := import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
STAMP := $(VENV)/.complete

.PHONY: help setup mt5 test slow long kills matrix benchmark soak newest docs lint ruff pyright pydoclint format ci constraints clean

help: ## show this list
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	echo
	echo 'Variables: N=2 (ranks of mt5), ARGS=... (passed on by mt5 and test), PYTHON=python3.11, VENV=.venv'

setup: $(STAMP) ## create the virtual environment in .venv

mt5: $(STAMP) ## train mT5 on the CMU Pronouncing Dictionary with N ranks
	composer -n $(N) run.py -f yamls/mt5.yaml $(ARGS)

test: $(STAMP) ## run the tests, but the slow and long ones: less than 10 minutes
	python -m pytest -m 'not slow and not long' $(ARGS)

slow: $(STAMP) ## run the slow tests: about 8 minutes
	python -m pytest -m slow $(ARGS)

long: $(STAMP) ## run the tests of launchers, nodes, four ranks, object stores, and commands in the docs: about 9 minutes
	python -m pytest -m long $(ARGS)

kills: $(STAMP) ## kill training at 180 random moments, and resume after each
	COMPOSER_DS_KILLS='60 20' python -m pytest --timeout 1800 -s tests/distributed/test_checkpoint_safety.py -k random_moments $(ARGS)
	COMPOSER_DS_SHARDED_KILLS='30 70' python -m pytest --timeout 3600 -s tests/distributed/test_sharded_safety.py -k random_moments $(ARGS)

matrix: $(STAMP) ## resume checkpoints of every strategy and world size under every other
	COMPOSER_DS_MATRIX=$${COMPOSER_DS_MATRIX:-covering} python -m pytest -v --timeout 7200 tests/distributed/test_matrix.py tests/distributed/test_resume_16bit.py $(ARGS)

benchmark: $(STAMP) ## time and memory of saving, loading, exporting and monitoring
	for one in saving sharded weights consolidate deepspeed_format monitors; do python -m tests.benchmarks.$$one; done

soak: $(STAMP) ## hundreds of random combinations of settings, against plain Composer
	COMPOSER_DS_EXAMPLES=400 python -m pytest --timeout 3600 tests/distributed/test_random_settings.py $(ARGS)

newest: $(STAMP) ## run the tests in a second environment, with the newest torch and with streaming
	[ -x .venv-newest/bin/python ] || uv venv --python $(VENV)/bin/python .venv-newest
	uv pip install --python .venv-newest/bin/python -e '.[dev]' mosaicml-streaming \
	    --override overrides.txt --override overrides-streaming.txt
	PATH="$(abspath .venv-newest)/bin:$$PATH" TORCH_EXTENSIONS_DIR=$(abspath .venv-newest)/torch_extensions \
	    .venv-newest/bin/python -m pytest -m 'not slow and not long' tests/unit tests/distributed \
	    tests/recipes/test_text_stream.py $(ARGS)

docs: $(STAMP) ## build docs/_build/html/index.html
	sphinx-build --fail-on-warning --keep-going --quiet -b html docs docs/_build/html

lint: ruff pyright pydoclint ## check style, types and docstrings

ruff: $(STAMP)
	ruff check
	ruff format --check

pyright: $(STAMP)
	pyright --pythonpath $(VENV)/bin/python

pydoclint: $(STAMP)
	pydoclint --quiet --config pyproject.toml composer_ds recipes

format: $(STAMP) ## format the code, and mend what ruff can mend
	ruff check --fix
	ruff format

ci: ## what the continuous integration runs
	bash .ci/run

constraints: $(STAMP) ## write constraints.txt anew, with the newest versions that fit together
	@resolved=$$(mktemp)
	trap 'rm -f $$resolved' EXIT
	tidy() { grep -vE "sys_platform == '(win32|emscripten)'" | sed -E "s/ *#.*//; s/ (and|;) sys_platform != 'emscripten'//"; }
	uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-header --annotation-style line \
	    pyproject.toml --output-file $$resolved
	{
	    echo '# The versions that are tested, for Python 3.10 to 3.12: pip install -e . -c constraints.txt'
	    echo '# Written by `make constraints`; run `make lint test` before you commit a new one.'
	    printf '\n# What pyproject.toml names\n'
	    grep -F '(pyproject.toml)' $$resolved | tidy
	    printf '\n# What those need\n'
	    grep -vF '(pyproject.toml)' $$resolved | tidy
	} > constraints.txt

clean: ## remove the virtual environment, compiled extensions and caches
	rm -rf $(VENV) $(EXTENSIONS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv installs in a fraction of pip's time. Where it fails (behind an index that only pip is configured for, say), pip does.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$${CXX:-c++}" > /dev/null || {
	    echo "No C++ compiler: '$${CXX:-c++}' is not on the PATH. DeepSpeed compiles its CPU optimizer with it." >&2
	    echo "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or name yours in CXX." >&2
	    exit 1
	}
	if [ ! -x $(VENV)/bin/python ]; then
	    for python in $(or $(PYTHON),python3.12 python3.11 python3.10 python3 python); do
	        "$$python" -c '$(SUPPORTED)' 2> /dev/null && break
	        python=
	    done
	    [ -n "$$python" ] || {
	        echo "No Python 3.10, 3.11 or 3.12 found ($(if $(PYTHON),PYTHON=$(PYTHON) is none,looked for python3.12 to python)). Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2
	        exit 1
	    }
	    echo "Setting up $(VENV) with $$("$$python" --version); the packages are about 3 GB, with torch's CUDA libraries."
	    "$$python" -m venv $(VENV) || {
	        echo "$$python cannot make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)." >&2
	        rm -rf $(VENV)
	        exit 1
	    }
	fi
	$(VENV)/bin/python -c '$(SUPPORTED)' || {
	    echo "$(VENV) holds $$($(VENV)/bin/python --version); 3.10 to 3.12 are supported. Run: make clean" >&2
	    exit 1
	}
	$(VENV)/bin/python -c '$(HEADERS)' || {
	    echo 'No Python.h: DeepSpeed compiles extensions of Python. Install its headers (Debian, Ubuntu: apt-get install python3-dev).' >&2
	    exit 1
	}
	python -m pip install --quiet --disable-pip-version-check uv -c constraints.txt || echo 'uv is not to be had; pip does it alone.'
	uv pip install --python $(VENV)/bin/python -e '.[dev]' -c constraints.txt ||
	    python -m pip install --disable-pip-version-check -e '.[dev]' -c constraints.txt
	versions=$$(python -c 'import sys; from importlib.metadata import version as of; print(of("torch"), of("deepspeed"), sys.version)')
	# Extensions that were compiled for another torch or Python crash.
	[ "$$versions" = "$$(cat $@ 2> /dev/null)" ] || rm -rf $(EXTENSIONS)
	echo "$$versions" > $@
