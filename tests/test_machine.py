"""Measured limits are numbers that a machine can have, and the fingerprint says what was measured."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from verax import machine

MADV_PAGEOUT = 21
"""`madvise` that gives pages back at once (Linux 5.4), as the kernel does when memory is short."""


def test_bandwidth_counts_every_byte(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 22)
    clock = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))  # each reading takes a second
    assert machine.measure_bandwidth(repetitions=2) == 1 << 22


def test_the_fingerprint_leaves_out_whose_home_the_cache_lies_in(monkeypatch):
    monkeypatch.setattr(machine, "compilation_cache", lambda: str(Path.home() / ".cache" / "verax"))
    assert machine.fingerprint()["compilation_cache"] == str(Path("~", ".cache", "verax"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_pages_that_the_kernel_takes_back_do_not_lower_the_growth_of_a_block(tmp_path):
    """In a new process, where no other test's threads and no garbage of theirs exist."""
    path = tmp_path / "mapped"
    path.write_bytes(os.urandom(1 << 20) * 30)
    # 40 MB are more than malloc keeps (32 MiB), so they are new to the process.
    program = f"""
import numpy as np
from verax import machine
mapped = np.memmap({str(path)!r}, np.uint8, "r")
assert mapped.max() == 255
np.ones(50_000_000, np.uint8)  # neither a peak before the block counts
with machine.peak_growth() as growth:
    mapped._mmap.madvise({MADV_PAGEOUT})
    np.ones(40_000_000, np.uint8)
np.ones(90_000_000, np.uint8)  # nor one after it
print(growth() / 1e6)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert float(done.stdout) == pytest.approx(40, abs=2)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps freed memory between what is in use")
def test_freed_memory_goes_back_to_the_system():
    held = psutil.Process().memory_info
    arrays = [np.ones(10_000, np.uint8) for _ in range(10_000)]
    kept, arrays = arrays[::100], None
    before = held().rss
    machine.return_freed_memory()
    assert before - held().rss > 50e6
    assert len(kept) == 100
