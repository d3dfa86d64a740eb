"""The delta rule part: forward and backward, with or without the libraries beside it."""

from verax.bench.accelerator import delta
from verax.bench.results import markdown

LIMITS = {
    "memory_bandwidth_gb_per_s": 50.0,
    "matmul_float32_gflop_per_s": 400.0,
    "matmul_bfloat16_gflop_per_s": 900.0,
}


def test_both_directions_are_measured_and_the_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: LIMITS)
    monkeypatch.setattr(delta, "_baselines", lambda folder: (None, "not installed"))
    (measured,) = delta.measure_delta(rehearse=True)
    assert [row.case for row in measured.rows] == ["delta rule, forward", "delta rule, forward and backward"]
    for row in measured.rows:
        assert (row.error, row.target) == ("", None)
        assert row.note.endswith("not installed")
    forward, both = measured.rows
    assert forward.flops < both.flops
    assert "forward and backward" in markdown(measured.result)


def test_the_target_is_a_multiple_of_flash_linear_attentions_time():
    side = {"median_s": 0.004, "flops": 100}
    case = {
        "runs": "verax chunk",
        "sides": {"verax chunk": side, "fla chunk": {"median_s": 0.002}},
        "bytes_moved": 5,
        "ratios": {"fla chunk": 0.5, "verax reference": 3.0},
    }
    row = delta._row("delta rule", case, "")
    assert (row.value, row.target, row.beside) == (4.0, 3.0, {"fla chunk": 0.5})
