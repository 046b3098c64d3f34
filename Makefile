# `make chat` on a fresh clone is all it takes. Nothing here prints to stdout but the programs it starts.
.PHONY: help setup chat demo test test-fast test-vulkan test-page test-neon test-sanitized fuzz wheels acceptance docs lint clean
.DEFAULT_GOAL := help

help:
	@echo 'make chat        talk to the default model; ARGS="--system TEXT" and other options are passed on'
	@echo 'make demo        plain against speculative decoding, side by side'
	@echo 'make setup       only prepare .venv; PYTHON=python3.12 chooses the interpreter'
	@echo 'make test        ruff, mypy, import-linter and the tests, with a short pass over real models'
	@echo 'make test-fast   the tests alone, without real models and without those that take long'
	@echo 'make test-vulkan tests on a second device; what it needs is in docs/vulkan.md'
	@echo "make test-page   the server's page in a real Chromium; see docs/guide/page.md"
	@echo "make test-neon   the kernels for 64-bit ARM in an emulator, held against this processor's; see docs/kernels.md"
	@echo "make test-sanitized  the kernels and their runtime under gcc's address and undefined sanitizers"
	@echo 'make fuzz        random work for minutes each: kernels and files (also under the sanitizers), scheduler, sessions, server'
	@echo 'make wheels      wheels for Linux, macOS and Windows into dist/, checked as far as this machine can'
	@echo 'make acceptance  the long pass over real models; ARGS=... is passed on'
	@echo 'make docs        the documentation as a site in build/docs; a dead link is an error'
	@echo 'make lint        ruff, mypy and import-linter alone'
	@echo 'make clean       remove environments, caches and build results; downloaded models stay'

setup:
	@sh scripts/setup.sh

chat: setup
	@exec .venv/bin/edgespec chat --profile laptop $(ARGS)

demo: setup
	@exec .venv/bin/python scripts/demo.py $(ARGS)

acceptance:
	@sh scripts/setup.sh dev
	@exec .venv/bin/python -m scripts.acceptance_run $(ARGS)

# The theme's notice about its own future goes to stderr at every build.
docs:
	@sh scripts/setup.sh dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

lint:
	@sh scripts/setup.sh dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports

# Tests without real models keep one core busy each. Tests with real models use every core and measure, so they run
# one by one. 5 is pytest's status if there is no test, which is a failure unless ARGS chose the tests.
TWO_AT_ONCE = .venv/bin/python -m pytest -n 2 --dist worksteal
# Other programs can starve one test on two cores. It is tried once more, and the last lines name it with RERUN.
ONCE_MORE = --reruns 1 -raR
MAY_BE_NONE = $(if $(ARGS),|| [ $$? -eq 5 ])

# Tests start hundreds of processes. Where no bytecode is written, each of them compiles the package again.
test test-fast: export PYTHONDONTWRITEBYTECODE =

test: lint
	$(TWO_AT_ONCE) $(ONCE_MORE) -m 'not models' $(ARGS) $(MAY_BE_NONE)
	.venv/bin/python -m pytest $(ONCE_MORE) -m models $(ARGS) $(MAY_BE_NONE)

test-fast:
	@sh scripts/setup.sh dev
	$(TWO_AT_ONCE) -m 'not models and not slow' $(ARGS)

test-page:
	@exec sh scripts/test_page.sh $(ARGS)

test-vulkan:
	@sh scripts/test_vulkan.sh $(ARGS)

test-neon:
	@sh scripts/test_neon.sh

wheels:
	@$${PYTHON:-python3} scripts/build_wheels.py --check $(ARGS)

# The library is rebuilt with the sanitizers, and without them afterwards. Tests of memory would measure the
# sanitizers, those of the build would replace the library, and the thread sanitizer refuses to run beside others.
SANITIZED = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)
COMPILE_SANITIZED = CC=gcc .venv/bin/python edgespec/kernels/compile.py -g -O1 -fno-omit-frame-pointer \
	-fsanitize=address,undefined -fno-sanitize-recover=undefined
WITH_SANITIZERS = LD_PRELOAD="$(SANITIZED)" ASAN_OPTIONS=detect_leaks=0 .venv/bin/python
test-sanitized:
	@sh scripts/setup.sh dev
	$(COMPILE_SANITIZED)
	$(WITH_SANITIZERS) -m pytest tests/kernels \
		tests/runtimes/test_native.py tests/runtimes/test_native_hostile.py tests/runtimes/test_native_tree.py \
		tests/runtimes/test_native_parts.py tests/runtimes/test_native_saved.py tests/runtimes/test_native_trimmed.py \
		tests/runtimes/test_native_requantized.py tests/runtimes/test_native_experts.py tests/runtimes/test_native_windows.py \
		tests/runtimes/test_native_deltas.py tests/runtimes/test_native_gemma4.py tests/runtimes/test_native_gpt_oss.py \
		-k 'not compile and not llama_cpp and not leak and not costs and not data_race' $(ARGS); \
		status=$$?; .venv/bin/python edgespec/kernels/compile.py; exit $$status

fuzz:
	@sh scripts/setup.sh dev
	.venv/bin/python -m tests.fuzz $(ARGS)
	$(COMPILE_SANITIZED)
	$(WITH_SANITIZERS) -m tests.fuzz --only kernels --only models; \
		status=$$?; .venv/bin/python edgespec/kernels/compile.py; exit $$status

clean:
	rm -rf .venv .venv-vulkan build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
