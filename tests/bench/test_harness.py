"""What is around every benchmark: noise is heard, limits are the longer of two, peaks and machine are in the result."""

import logging

import pytest

from verax.bench import harness

LIMITS = {"memory_bandwidth_gb_per_s": 50.0, "matmul_float32_gflop_per_s": 400.0, "matmul_bfloat16_gflop_per_s": 800.0}


def test_the_limit_is_the_longer_of_memory_and_products():
    assert harness.limit_seconds(LIMITS, bytes_moved=100e9, flops=1, dtype="float32") == 2.0
    assert harness.limit_seconds(LIMITS, bytes_moved=1, flops=1200e9, dtype="float32") == 3.0
    assert harness.limit_seconds(LIMITS, bytes_moved=1, flops=1200e9, dtype="bfloat16") == 1.5


def test_what_others_use_of_the_processor_does_not_count_our_own(monkeypatch):
    monkeypatch.setattr(harness.time, "sleep", lambda _: None)
    monkeypatch.setattr(harness.machine, "num_cores", lambda: 2)
    seconds = iter([(100.0, 7.0), (100.0 + 0.75 * 2 * harness.LISTEN, 7.0 + 0.25 * 2 * harness.LISTEN)])
    monkeypatch.setattr(harness, "_cpu_seconds", lambda: next(seconds))
    noise = harness.measure_noise()
    assert noise["others"] == pytest.approx(0.5)
    assert noise["busy"]
    assert noise["spread"] > 0


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_machine_is_warned_of_and_remembered(monkeypatch, caplog, busy):
    monkeypatch.setattr(harness, "measure_noise", lambda: {"spread": 0.5, "others": 0.25, "busy": busy})
    monkeypatch.setattr(harness.machine, "measure_machine", lambda: LIMITS)
    with caplog.at_level(logging.WARNING, "verax.bench"):
        benchmark = harness.Benchmark("text")
    assert ("busy before the start" in caplog.text) == busy
    result = benchmark.result({"runs": 3}, {"torch": "2"}, sides={})
    assert result["noise"]["busy"] == busy
    assert result["measured"] == LIMITS
    assert result["machine"]["torch"] == "2"
    assert result["memory"]["host_peak_gb"] > 0.01
    assert result["memory"]["device_peak_gb"] is None  # a CPU's memory is the host's
    assert result["settings"] == {"runs": 3}


def test_a_run_is_set_against_the_limit(monkeypatch):
    monkeypatch.setattr(harness, "measure_noise", lambda: {"busy": False})
    monkeypatch.setattr(harness.machine, "measure_machine", lambda: LIMITS)
    work = harness.Benchmark("ops").against_limit(4.0, bytes_moved=100e9, flops=400e9, dtype="float32")
    assert (work["gb_per_s"], work["gflop_per_s"]) == (25.0, 100.0)
    assert (work["limit_s"], work["fraction_of_limit"]) == (2.0, 0.5)
