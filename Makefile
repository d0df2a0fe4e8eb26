# Every target makes .venv itself when it is missing or older than pyproject.toml.
PYTHON ?= python3.11
# On Linux, pip's default torch wheel carries CUDA; set PIP_EXTRA_INDEX_URL or PIP_INDEX_URL to
# choose another build of the same version.
PIP_FLAGS ?=
BIN := .venv/bin
NPU := .venv-npu
STAMP := .venv/installed
export OMP_NUM_THREADS ?= 1

.PHONY: venv serve browser test test-slow test-npu bench lint

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
	$(BIN)/python -m tests.halves $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

# torch_npu breaks `import torch` where CANN is missing, so it has an environment of its own, which
# sees the packages of .venv behind its own.
$(NPU)/installed: tests/npu/requirements.txt $(STAMP)
	test -x $(NPU)/bin/python || $(PYTHON) -m venv $(NPU)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$(echo $(NPU)/lib/python3*/site-packages)/packages-of-venv.pth
	$(NPU)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) -r $<
	touch $@

# The npu backend's host code with the real torch_npu on stand-ins of CANN: no kernel runs.
test-npu:
	@if command -v gcc nm >/dev/null && $(MAKE) --no-print-directory $(NPU)/installed; then \
		$(NPU)/bin/python -m pytest tests/npu $(ARGS); \
	else \
		echo "SKIPPED test-npu: it needs gcc, nm and the wheels of tests/npu/requirements.txt"; \
	fi

bench: $(STAMP)
	$(BIN)/nrank bench --json $(ARGS)
