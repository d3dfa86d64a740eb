"""Measured limits are numbers that a machine can have, and the fingerprint says what was measured."""

import gc
import sys
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from verax import machine


def test_bandwidth_counts_every_byte(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 22)
    clock = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))  # each reading takes a second
    assert machine.measure_bandwidth(repetitions=2) == 1 << 22


def test_the_matmul_rate_counts_two_operations_a_term(monkeypatch):
    monkeypatch.setattr(machine, "MATMUL_SIZE", 64)
    clock = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine._matmul_rate(jax.numpy.float32) == 2 * 64**3


def test_the_fingerprint_names_versions_and_devices():
    facts = machine.fingerprint()
    assert facts["jax"] == jax.__version__
    assert facts["platform"] == "cpu"
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > facts["memory_available_gib"] > 0


def test_the_fingerprint_leaves_out_whose_home_the_cache_lies_in(monkeypatch):
    monkeypatch.setattr(machine, "compilation_cache", lambda: str(Path.home() / ".cache" / "verax"))
    assert machine.fingerprint()["compilation_cache"] == str(Path("~", ".cache", "verax"))


def test_peak_memory_is_in_bytes():
    held = psutil.Process().memory_info().rss
    assert held / 2 < machine.peak_memory() < psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_growth_of_a_block_is_its_own():
    gc.collect()  # what other tests left is not to go meanwhile
    np.ones(50_000_000, np.uint8)  # a peak before the block does not count
    with machine.peak_growth() as growth:
        np.ones(40_000_000, np.uint8)  # more than malloc keeps for later (32 MiB), so it is new to the process
    np.ones(90_000_000, np.uint8)  # nor one after it
    assert 35e6 < growth() < 55e6
