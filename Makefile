# Every target makes .venv when it is missing and installs commkern anew when sources
# changed. Needs python3 >= 3.10 with venv, a C++20 compiler and make; cmake and ninja
# come as wheels where they are missing.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := $(VENV)/constraints.txt
CXX_FILES := $(shell find csrc \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \))
PY_FILES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name 'py.typed')
SOURCES := $(CXX_FILES) $(PY_FILES) $(wildcard cmake/*) CMakeLists.txt pyproject.toml README.md LICENSE

# An extra that is installed brings these, too.
BRINGS_cli := cli
BRINGS_bench := cli bench
BRINGS_test := cli bench test
BRINGS_dev := cli bench test dev

.PHONY: help demo test soak bench doctor lint format wheel clean
.DELETE_ON_ERROR:
.SECONDARY:

help:
	@echo 'make demo     train a small GPT under several compressors (ARGS=... for options)'
	@echo 'make test     run every test against the installed package (ARGS=... for pytest)'
	@echo 'make soak     run the tests that take minutes, too long for make test'
	@echo 'make bench    run the benchmarks (ARGS=... for options)'
	@echo 'make doctor   show what is active and why, check every kernel'
	@echo 'make lint     check style and types          make format   apply the style'
	@echo 'make wheel    build sdist and wheel in dist  make clean    remove what make made'

demo: $(VENV)/.cli
	$(BIN)/commkern demo --json demo-result.json --plot demo-result.png $(ARGS)

test: $(VENV)/.test
	$(BIN)/pytest $(ARGS)

soak: $(VENV)/.test
	$(BIN)/pytest -m slow $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/commkern bench $(ARGS)

doctor: $(VENV)/.cli
	$(BIN)/commkern doctor

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(VENV)/.build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) build dist demo-result.json demo-result.png
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.build: $(VENV)/.venv
	$(PIP) install --quiet 'build>=1.2'
	touch $@

# torch first, then everything else under the constraint of exactly that version: no
# dependency may bring another build of it.
$(CONSTRAINTS): $(VENV)/.venv
	$(PIP) install --quiet '$(TORCH)'
	$(BIN)/python -c "from importlib.metadata import version as v; print('torch==' + v('torch'))" > $@

$(VENV)/.%: $(CONSTRAINTS) $(SOURCES)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) '.[$*]'
	touch $(addprefix $(VENV)/.,$(BRINGS_$*))
