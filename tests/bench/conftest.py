"""Benchmarks measure the limits of the machine too: with little work here."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def little_to_measure():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verax.machine.READ_BYTES", 1 << 22)
        patch.setattr("verax.machine.MATMUL_SIZE", 128)
        yield
