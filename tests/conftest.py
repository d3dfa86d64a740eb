"""Runtime checking of shape annotations, on for tests only, where arrays are; how much is compiled; memory; threads.

Elsewhere public functions are to refuse wrong types with their own errors, and a checker in front would hide them.
"""

import ctypes
import gc
import os
import signal
import sys
from importlib.metadata import version

import psutil
import pytest
from jaxtyping import install_import_hook
from packaging.version import Version

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before PyTorch is imported: its threads wait for each other in loops, which starves the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of the suite's time is compilation, which takes XLA half as long without its optimisations.
QUICK = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1"
OPTIMISED = {"parity", "real", "gpu", "serve", "targets"}
"""Folders whose programs are compiled as for users in any case. Their tests compare values with other libraries, or
answers alone with those in a batch, which without optimisations may part where two tokens are almost equally likely, or
read what the optimisations of another device's compiler come to."""

LONG = ("video/test_mesh", "recipes/text/test_recipe", "recipes/video/test_recipe", "cli/test_demo", "bench/test_delta")
"""Files of few tests that take long. They come first, so that no worker is left with one at the end."""

ARRAYS = ("ops", "nn", "models", "text.step.step", "text.step.slots", "text.step.runner", "train.loss")

# A shell's background jobs ignore Ctrl-C, which Python leaves so. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes millions of objects and little garbage: looking for it took a tenth of the time of the suite.
gc.set_threshold(50_000, 20, 20)

install_import_hook([f"verax.{name}" for name in ARRAYS], "beartype.beartype")


QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""XLA's older way to compile fusions, which takes a third off the suite's time and which JAX 0.11 does not know; and no
parts of a program that threads could compile side by side: another worker has the other core."""


@pytest.fixture(scope="session", autouse=True)
def processor(record_testsuite_property):
    """Name of the processor in the file that `--junitxml` writes, for `docs/models_matrix.py`."""
    from verax.machine import cpu_name

    record_testsuite_property("processor", cpu_name())


@pytest.fixture
def anyio_backend():
    """The event loop of tests that are coroutines."""
    return "asyncio"


def _is_quick(item):
    return QUICK and OPTIMISED.isdisjoint(folder.name for folder in item.path.parents)


def pytest_collection_finish(session):
    """Sets the flags, which hold for a whole process, if no test of the session wants programs as users have them."""
    if all(map(_is_quick, session.items)) and Version(version("jaxlib")) < Version("0.11"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"


SLOW = (
    # They need what the extra `test` does not install: PyTorch, a browser, clients and checkers of the server, Parquet.
    "batch/test_results.py::test_a_row_of_parquet",
    "batch/test_requests.py::test_rows_are_the_requests_of_lines",
    "batch/test_requests.py::test_a_file_that_is_not_parquet_is_refused",
    "batch/test_requests.py::test_answers_become_rows",
    "bench",
    "cli/test_embed.py::test_a_batch_of_plain_lines_becomes_parquet",
    "deploy",
    "serve/page",
    "serve/test_docs_examples",
    "serve/test_messages.py::test_anthropics_client",
    "serve/test_openapi.py::test_the_description_is_valid",
    "serve/test_openapi_cases",
    "serve/test_responses.py::test_openais_client",
    "serve/test_videos.py::test_openai_python",
    "test_wheel",
    # They compare with files that `make real-tokenizers` and `make real-models` fetch, after `make test` where CI runs.
    "text/test_chat_format.py::test_llama_3",
    "text/test_chat_format.py::test_qwen3",
    "text/test_gbnf.py::test_llama_cpp_s",
    "text/test_gemma_calls.py::test_the_published_template",
    "text/test_gguf.py::test_each_key_of_a_tokenizer",
    "text/test_gguf.py::test_gemma_s",
    "text/test_gguf.py::test_ids_are_those_that_llama_cpp_expects",
    "text/test_gguf.py::test_long_runs",
    "text/test_gguf.py::test_the_tokens_that_end_a_text",
    "text/test_harmony.py::test_the_published_template",
    # They take long: each CPU kernel in every variant, kernels for GPUs and TPUs interpreted, gradients, whole clips.
    "checkpoint/video/test_quantized",
    "cli/test_convert",
    "cli/test_plan",
    "cli/test_video",
    "embed/test_quantization",
    "models/test_lam",
    "models/wan",
    "nn/test_layers.py::test_an_engine_packs",
    "ops/cpu",
    "ops/test_attention.py::test_gradients_of_splash",
    "ops/test_attention.py::test_packed_sequences_see_their_own_keys_in_splash",
    "ops/test_attention.py::test_splash",
    "ops/test_delta.py::test_packed",
    "ops/test_delta_gradient",
    "ops/test_delta_parallel",
    "ops/test_delta_scan",
    "ops/test_delta_step",
    "ops/test_hierarchical",
    "ops/test_linear.py::test_the_gpus",
    "ops/test_paged_kernels",
    "ops/test_shard_map",
    "plan",
    "text/test_lora.py::test_adapters_answer_as_without_drafts",
    "text/speculative/test_drafters",
    "text/speculative/test_prediction_head.py::test_hybrids",
    "text/test_kv_cache",
    "text/test_weight_update",
    "video/test_caches",
    "video/test_half_size",
    "video/test_pipeline",
    "video/test_quantized",
    "video/test_tiny_decoder",
    "video/test_wan22",
)
"""Tests that `make test` leaves out, by the beginnings of their names."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark slow tests, and put long files first, which `--no-loadscope-reorder` keeps there.

    Otherwise the file with most tests is first.
    """
    for item in items:
        # A CPU kernel at a level of its own, among an operation's other implementations.
        if item.nodeid.removeprefix("tests/").startswith(SLOW) or "native " in item.name:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Decides how a test's programs are compiled, also in its fixtures and in the processes that it starts."""
    quick = _is_quick(item)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", quick)


MOST_KEPT = 1_500_000_000
"""Bytes of memory in use above which a process drops what JAX compiled for earlier files of tests."""


@pytest.fixture(scope="module", autouse=True)
def freed_memory():
    """Returns freed memory to the system after each file of tests, and compiled programs where these grow large.

    The programs of a file take 100 to 600 MB; files that start the same engine share them. The program of an engine in
    a fixture of the session is an object of that engine and stays.

    What is alive after a file is frozen: a collection walks all objects, which takes a second once a few libraries and
    programs are loaded, and then finds garbage among the objects of the current file only.
    """
    yield
    gc.collect()
    if "jax" in sys.modules and psutil.Process().memory_info().rss > MOST_KEPT:
        gc.unfreeze()
        sys.modules["jax"].clear_caches()
        gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
