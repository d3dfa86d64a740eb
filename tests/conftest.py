"""Runtime checking of shape annotations, on for tests only, where arrays are; memory given back after a file; threads.

Elsewhere public functions are to refuse wrong types with their own errors, and a checker in front would hide them.
"""

import ctypes
import gc
import os
import sys

import pytest
from jaxtyping import install_import_hook

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before PyTorch is imported: its threads wait for each other in loops, which starves the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ARRAYS = ("ops", "nn", "models", "text.step", "text.slots", "text.runner", "train.loss", "train.precision")

install_import_hook([f"verax.{name}" for name in ARRAYS], "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def freed_memory():
    """Drops what JAX compiled for a file of tests, and returns freed memory to the system.

    A process of the whole suite otherwise keeps the programs of every file: 100 to 600 MB each. The program of an
    engine in a fixture of the session is an object of that engine and stays.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
