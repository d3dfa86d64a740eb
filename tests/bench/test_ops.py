"""The operations' benchmark: every implementation is there, numbers fit together, wrong names are refused."""

from functools import partial

import jax.numpy as jnp
import pytest

from verax import ops
from verax.bench import harness
from verax.bench import ops as bench
from verax.bench.results import markdown
from verax.bench.settings import OpsSettings


def run(**changes):
    settings = dict(size_in=256, size_out=48, rows=[1, 2000], weights=["bfloat16", "int4-32"], only=["linear"])
    return bench.bench_ops(OpsSettings(**{**settings, **changes}, runs=2, warmup=1))


@pytest.fixture(autouse=True)
def _little_work(monkeypatch):
    monkeypatch.setattr(harness, "SHORTEST", 0.0)
    monkeypatch.setattr(bench, "COLD", 1 << 16)


def test_each_case_names_the_implementation_that_runs_and_times_the_others():
    result = run()
    cases = {case["case"]: case for case in result["cases"]}
    assert list(cases) == ["bfloat16, 1 rows", "bfloat16, 2000 rows", "int4-32, 1 rows", "int4-32, 2000 rows"]
    for case in cases.values():
        assert {case["chosen"], "reference"} <= set(case["sides"]) <= {*ops.linear.implementations, bench.PACKED}
        assert set(case["ratios"]) == set(case["sides"]) - {case["chosen"]}
        assert case["fraction_of_limit"] > 0 < case["bandwidth_gb_per_s"]
    assert (cases["bfloat16, 1 rows"]["bytes_moved"], cases["bfloat16, 1 rows"]["flops"]) == (
        256 * 48 * 2,
        2 * 256 * 48,
    )
    assert cases["int4-32, 1 rows"]["bytes_moved"] == 256 * 48 // 2 + 8 * 48 * 2
    int4, many = ops.quantize(jnp.ones((48, 256)), 4, 32), jnp.ones((2000, 256))
    assert cases["int4-32, 2000 rows"]["chosen"] == ops.linear.select(many, int4).name
    assert result["name"] == "linear-256"
    assert "| linear | int4-32, 1 rows | reference |" in markdown(result)


def test_a_weight_that_models_pack_is_timed_as_it_is_packed():
    cases = {case["case"]: case for case in run(rows=[1, 64], weights=["float32", "int8"])["cases"]}
    weight = jnp.ones((48, 256))
    weights = {"float32": weight, "int8": ops.quantize(weight, 8)}
    for name, case in cases.items():
        packed = ops.pack_weight(weights[name.partition(",")[0]], few_rows="1 rows" in name)
        packs = isinstance(packed, ops.PackedWeight)
        assert (case["chosen"] == bench.PACKED) == (bench.PACKED in case["sides"]) == packs


SMALL = {
    "attention": [
        partial(bench.whole_sequence, 20, heads=(2, 2, 16)),
        partial(bench.paged_decode, 2, 20, heads=(4, 2, 16)),
        partial(bench.ragged, [5, 8], [1, 5], heads=(4, 2, 16)),
        partial(bench.cache_write, 4, heads=(4, 2, 16)),
    ],
    "conv": [
        partial(bench.conv, (3, 4, 6), 2, 5),
        partial(bench.conv, (3, 4, 6), 2, 5, cached=False, dtype="float32"),
        partial(bench.conv, (4, 6), 2, 5, kernel=(3, 3), stride=2),
    ],
}
KINDS = ["attention", "paged_decode_attention", "paged_attention", "write_pages", "conv3d", "conv3d", "conv2d"]


def test_attention_cache_writes_and_convolutions_are_cases_too(monkeypatch):
    monkeypatch.setattr(bench, "CASES", SMALL)
    result = run(only=["attention", "conv"])
    cases = result["cases"]
    assert [case["group"] for case in cases] == KINDS
    assert all(case["chosen"] in case["sides"] for case in cases)
    assert cases[0]["flops"] == 4 * 2 * 20 * 20 * 16
    whole, first, image = cases[4:]
    assert whole["flops"] == 2 * (3 * 4 * 6 * 5) * (2 * 27)
    assert first["flops"] == 2 * (4 * 6 * 5) * (2 * 9) * (1 + 2 + 3)
    assert whole["bytes_moved"] == 2 * (5 * 4 * 6 * 2 + 5 * 2 * 27 + 3 * 4 * 6 * 5)
    assert image["flops"] == 2 * (2 * 3 * 5) * (2 * 9)
    assert all("reference" in case["sides"] for case in (whole, first, image))
    assert "| write_pages | bfloat16, 4 tokens" in markdown(result)


def test_experts_are_cases_too(monkeypatch):
    monkeypatch.setattr(bench, "EXPERT_SIZES", {"experts": 6, "chosen": 2, "size_in": 64, "size_out": 48})
    monkeypatch.setattr(bench, "TOKENS", (1, 40))
    cases = run(only=["grouped"])["cases"]
    names = [f"{kind}, {count} tokens" for kind in ("bfloat16", "int4-32") for count in (1, 40)]
    assert [case["case"] for case in cases] == names
    # One token reads two of the experts, forty read all of them.
    assert [case["bytes_moved"] for case in cases[:2]] == [2 * 48 * 64 * 2, 6 * 48 * 64 * 2]
    assert [case["flops"] for case in cases[:2]] == [2 * count * 2 * 48 * 64 for count in (1, 40)]
    assert all(case["chosen"] in case["sides"] for case in cases)
