"""Runtime checking of shape annotations, on for tests only, where arrays are; how much is compiled; memory; threads.

Elsewhere public functions are to refuse wrong types with their own errors, and a checker in front would hide them.
"""

import ctypes
import gc
import os
import sys

import psutil
import pytest
from jaxtyping import install_import_hook

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before PyTorch is imported: its threads wait for each other in loops, which starves the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of the suite's time is compilation, which takes XLA half as long without its optimisations.
QUICK = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1"
OPTIMISED = {"parity", "real", "gpu", "serve", "targets"}
"""Folders whose programs are compiled as for users in any case. Their tests compare values with other libraries, or
answers alone with those in a batch, which without optimisations may part where two tokens are almost equally likely, or
read what the optimisations of another device's compiler come to."""

ARRAYS = ("ops", "nn", "models", "text.step", "text.slots", "text.runner", "train.loss", "train.precision")

# Tracing makes millions of objects and little garbage: looking for it took a tenth of the time of the suite.
gc.set_threshold(50_000, 20, 20)

install_import_hook([f"verax.{name}" for name in ARRAYS], "beartype.beartype")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Decides how a test's programs are compiled, those of its fixtures and of the processes that it starts too."""
    quick = QUICK and OPTIMISED.isdisjoint(folder.name for folder in item.path.parents)
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
    programs are loaded, and then finds garbage among those of the current file only.
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
