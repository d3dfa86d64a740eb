"""Measured limits are numbers that a machine can have, and the fingerprint says what was measured."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import psutil
import pytest

from verax import machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MADV_PAGEOUT = 21
"""`madvise` that gives pages back at once (Linux 5.4), as the kernel does when memory is short."""


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


def growth_in_a_new_process(before, block):
    """`peak_growth` around statements, in MB, where no other test's threads and no garbage of theirs exist."""
    program = f"""
import mmap, os, sys
import numpy as np
from verax import machine
{before}
with machine.peak_growth() as growth:
    {block}
np.ones(90_000_000, np.uint8)  # a peak after the block does not count
print(growth() / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return float(done.stdout)


@linux
def test_the_growth_of_a_block_is_its_own():
    # A peak before it does not count either. 40 MB are more than malloc keeps (32 MiB), so they are new to the process.
    growth = growth_in_a_new_process("np.ones(50_000_000, np.uint8)", "np.ones(40_000_000, np.uint8)")
    assert growth == pytest.approx(40, abs=2)


@linux
def test_mapped_pages_that_the_kernel_takes_back_do_not_lower_the_growth(tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(os.urandom(1 << 20) * 30)
    before = f"mapped = np.memmap({str(path)!r}, np.uint8, 'r')\nassert mapped.max() == 255"
    block = f"mapped._mmap.madvise({MADV_PAGEOUT})\n    np.ones(40_000_000, np.uint8)"
    assert growth_in_a_new_process(before, block) == pytest.approx(40, abs=2)
