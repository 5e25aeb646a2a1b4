# Every target sets itself up: only Python >= 3.11, git and make are needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test coverage soak test-integration test-browser test-wheel docs check format lint type bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltaband needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# In an environment that is there, or in one with what it needs.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltaband needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,plots]'
	touch $@

demo: .venv/demo
	$(BIN)/deltaband demo

# Two processes, each with whole files, which share costly fixtures.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# The same tests, and a failure below the share of lines that pyproject.toml asks for.
coverage: $(READY)
	rm -rf build/coverage
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --cov --cov-report term

# Figures are shown for tests that pass, too.
soak: $(READY)
	$(BIN)/python -m pytest tests/soak -rP

.venv/integration: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integration]'
	touch $@

test-integration: .venv/integration
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/integration

.venv/browser: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	touch $@

# Debian's Chromium; the driver never downloads a browser of its own.
/usr/bin/chromium:
	@command -v apt-get > /dev/null || { echo "install Chromium as /usr/bin/chromium first"; exit 1; }
	@if [ "$$(id -u)" = 0 ]; then run=; elif command -v sudo > /dev/null; then run=sudo; \
	else echo "Chromium is missing, and apt-get needs root: install the package chromium first"; exit 1; fi; \
	install="$$run env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq"; \
	$$install update && $$install install -y --no-install-recommends chromium fonts-dejavu-core

# The report, and the pages of the site.
test-browser: .venv/browser site | /usr/bin/chromium
	$(BIN)/python -m pytest tests/browser

# An archive, the wheel made from it, and an environment that holds the wheel and its core dependencies alone.
test-wheel: $(READY)
	rm -rf build/wheel
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/wheel/dist
	$(BIN)/twine check --strict build/wheel/dist/*
	$(BIN)/python tests/packaging/contents.py build/wheel/dist
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt build/wheel/dist/*.whl
	build/wheel/venv/bin/python tests/packaging/smoke.py

.venv/docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The pages are those of docs/, the committed results and the gallery, whose programs run: so the source is the whole
# repository.
docs: .venv/docs
	rm -rf site
	$(MAKE) site

site: .venv/docs
	rm -rf build/doctrees docs/gallery
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --conf-dir docs --doctree-dir build/doctrees . site

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint type test

bench: $(READY)
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.calibration
	$(BIN)/python -m benchmarks.families
	$(BIN)/python -m benchmarks.laplace
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.published
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.distributed

clean:
	rm -rf .venv .venv-laplace .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site docs/gallery demo-output
