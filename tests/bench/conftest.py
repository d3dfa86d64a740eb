"""Benchmarks measure the limits of the machine too: with little work here, or none."""

from functools import partial

import pytest

from tests.cli.conftest import run as run

LIMITS = {"memory_bandwidth_gb_per_s": 50.0, "matmul_float32_gflop_per_s": 400.0, "matmul_bfloat16_gflop_per_s": 900.0}


@pytest.fixture(autouse=True, scope="package")
def known_machine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verax.machine.READ_BYTES", 1 << 16)
        patch.setattr("verax.machine.measure_machine", lambda: LIMITS)
        yield


@pytest.fixture
def bench(run):
    """Function that runs `verax bench` with arguments; exit status, standard output and error."""
    return partial(run, "bench")
