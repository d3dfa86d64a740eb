"""The operations' benchmark: every form is there, numbers fit together, wrong names are refused."""

import pytest

from verax import ops
from verax.bench import ops as bench
from verax.bench.report import markdown, write
from verax.errors import InvalidParameterError

LIMITS = {
    "memory_bandwidth_gb_per_s": 50.0,
    "matmul_float32_gflop_per_s": 400.0,
    "matmul_bfloat16_gflop_per_s": 900.0,
}


def run(**changes):
    settings = dict(size_in=256, size_out=48, rows=[1, 200], weights=["bfloat16", "int4-32"], runs=2, warmup=1)
    return bench.bench_ops(**{**settings, **changes})


@pytest.fixture(autouse=True)
def _no_measurement_of_the_machine(monkeypatch):
    monkeypatch.setattr(bench, "measure_machine", lambda: LIMITS)


def test_each_case_names_the_form_that_runs_and_times_the_others(tmp_path):
    result = run()
    cases = {(case["weight"], case["rows"]): case for case in result["cases"]}
    assert set(cases) == {("bfloat16", 1), ("bfloat16", 200), ("int4-32", 1), ("int4-32", 200)}
    for case in cases.values():
        assert {case["runs"], "plain"} <= set(case["sides"]) <= set(ops.linear.forms)
        assert set(case["ratios"]) == set(case["sides"]) - {case["runs"]}
        assert case["fraction_of_limit"] > 0
    assert cases["bfloat16", 1]["bytes_read"] == 256 * 48 * 2
    assert cases["int4-32", 1]["bytes_read"] == 256 * 48 // 2 + 8 * 48 * 2
    assert cases["int4-32", 200]["runs"] == "dequantized"
    written = write(result, tmp_path)
    assert written.with_suffix(".md").read_text().count("| int4-32 |") == 2
    assert markdown(result).startswith("# Operations: linear, weight 48 x 256")


@pytest.mark.parametrize("wrong", [{"weights": ["int3"]}, {"against": ["tensorflow"]}])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(InvalidParameterError, match=next(iter(wrong))):
        run(**wrong)
