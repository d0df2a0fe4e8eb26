# Every target makes .venv itself when it is missing or older than pyproject.toml.
PYTHON ?= python3.11
# On Linux, pip's default torch wheel carries CUDA; set PIP_EXTRA_INDEX_URL or PIP_INDEX_URL to
# choose another build of the same version.
PIP_FLAGS ?=
BIN := .venv/bin
STAMP := .venv/installed
export OMP_NUM_THREADS ?= 1

.PHONY: venv serve browser test test-slow bench lint

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[dev]'
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/nrank serve $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For the test of the status page: Chromium where there is none, for this user, else by apt as root.
browser: $(STAMP)
	$(BIN)/python -m tests.serve.browser || $(BIN)/playwright install chromium || \
		(apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium)

test: lint
	@$(MAKE) --no-print-directory browser || echo "no Chromium: the status page goes untested"
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

bench: $(STAMP)
	$(BIN)/nrank bench --json $(ARGS)
