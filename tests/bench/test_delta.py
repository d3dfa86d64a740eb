"""The delta rules' benchmark: counts by formula, sides that must agree, Cython's route, reports."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from verax.bench import delta, harness
from verax.bench.delta import check, torch_side
from verax.bench.harness import Case
from verax.bench.settings import CONFIGURATIONS, SECTIONS, DeltaSettings
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError

torch = pytest.importorskip("torch")


def test_the_gated_rules_count():
    # One token, one head: decay, two reads, one write of a state of 4 x 8.
    assert delta.gated_rule_flops(1, 1, 4, 8) == 7 * 32
    d, C = 128, 64
    assert delta.gated_rule_flops(10, 3, d, d, C) == 30 * (6 * d * d + 10 * C * d + C * C // 3)
    assert delta.gated_rule_flops(10, 3, d, d, C, solved=True) == 30 * (6 * d * d + 7 * C * d)
    assert delta.gated_rule_bytes(5, 2, 3, 4, 8) == 5 * 3 * 4 * (4 + 4 + 8 + 8 + 2) + 2 * 2 * 3 * 4 * 8 * 4


@pytest.fixture(scope="module")
def small():
    """Small cases, and nothing of the machine is measured."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = dict(vocab_size=40, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=3)
        patch.setattr(delta, "LAM", dataclasses.replace(delta.LAM, **sizes))
        patch.setattr(delta, "SENTENCES", {"Short": (2, 64)})
        patch.setitem(CONFIGURATIONS, "Small", (1, 2, 32))
        patch.setattr(delta, "HEADS", 2)
        patch.setattr(delta, "SIZE", 16)
        patch.setattr(delta, "DECODE", (3, 1, 2, 16))
        patch.setattr(harness, "SHORTEST", 0.0)
        yield


@pytest.fixture(scope="module")
def result(small):
    return delta.bench_delta(DeltaSettings(configs="Small", against="torch,transformers", runs=2, warmup=0))


def test_all_sides_do_the_same_work_and_are_in_one_result(result):
    by_name = {(case["group"], case["case"]): case for case in result["cases"]}
    names = [("encoder", f"Short, variant {variant}") for variant in "BC"]
    assert list(by_name) == [(name, "Small") for name in list(SECTIONS)[:3]] + [("decode", "Step"), *names]
    transformers = {"transformers chunk", "transformers recurrent"}
    assert {"verax reference", "torch"} <= set(by_name["rule", "Small"]["sides"])
    assert {"verax reference", "verax chunk"} | transformers <= set(by_name["gated", "Small"]["sides"])
    assert {"verax step", "transformers recurrent"} <= set(by_name["decode", "Step"]["sides"])
    # torch counts its own products; ours are counted in the reference that does the same.
    rule = by_name["rule", "Small"]["sides"]
    assert rule["verax reference"]["flops"] == pytest.approx(rule["torch"]["flops"], rel=0.02)
    for (section, _), case in by_name.items():
        if section not in ("gated", "decode"):
            assert {case["chosen"], "torch"} <= set(case["sides"])
        assert set(case["ratios"]) == set(case["sides"]) - {case["chosen"]}
        for name, side in case["sides"].items():
            assert 0 < side["error"] < case["tolerance"]
            assert len(side["seconds"]) == 2
            assert side["fraction_of_limit"] > 0
            assert (side["compile_s"] is not None) == name.startswith("verax")
    assert by_name["decode", "Step"]["bytes_moved"] == 3 * 2 * 4 * (4 * 16 + 2) + 2 * 3 * 2 * 16 * 16 * 4
    assert result["machine"]["torch"] == torch.__version__


def torch_ones(dtype, scale=1.0):
    return torch_side(torch, lambda: (scale * torch.ones(3, dtype=dtype),), flops=1)


@pytest.mark.parametrize(
    ("dtype", "scale", "shape", "platform", "match"),
    [
        ("float32", 1.1, (3,), "cpu", r"Small, torch: computes something else: .* 0\.1 of the result"),
        ("float32", float("nan"), (3,), "cpu", "computes something else"),
        ("float64", 1.0, (3,), "cpu", r"'float64', 'cpu'\); it claims to be \(\(3,\), 'float32', 'cpu'\)"),
        ("float32", 1.0, (3,), "gpu", r"'cpu'\); it claims to be \(\(3,\), 'float32', 'gpu'\)"),
        ("float32", 1.0, (1, 3), "cpu", r"is \(\(3,\)"),
    ],
)
def test_a_side_that_computes_something_else_or_elsewhere_is_refused(dtype, scale, shape, platform, match):
    sides = {"torch": torch_ones(getattr(torch, dtype), scale)}
    case = Case("rule", "Small", 1, "verax", sides, expected=[np.ones(shape)], tolerance=1e-4)
    with pytest.raises(VeraxError, match=match):
        check(case, "torch", platform)


def test_cython_runs_the_same_code(monkeypatch, tmp_path):
    pytest.importorskip("Cython")
    from verax.compare.references import lam

    monkeypatch.setenv("CFLAGS", "-O0")
    compiled = delta.cythonized(Path(lam.__file__), tmp_path)
    assert Path(compiled.__file__).suffix == ".so"
    layers = []
    for library in (lam, compiled):
        torch.manual_seed(0)
        layers.append(library.EnhancedHierarchicalDeltaNet(48, 3, chunk_size=32).eval())
    assert type(layers[1]).__module__ == "lam_cython"
    x = torch.randn(2, 64, 48)
    assert torch.equal(layers[0](x)[0], layers[1](x)[0])


def test_without_a_compiler_cython_is_named_and_the_rest_remains(bench, small, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(MissingDependencyError, match="a C compiler"):
        delta.find_baselines(DeltaSettings(against="cython"), tmp_path)
    status, out, _ = bench("delta", "--only", "decode", "--runs", 1, "--warmup", 0, "--output", tmp_path)
    assert (status, "| Step | **verax " in out) == (0, True)
    assert "Left out: cython (the baseline needs Cython, setuptools and a C compiler" in out
    assert [path.name[:5] for path in tmp_path.glob("*.json")] == ["delta"]


def test_platforms_without_a_common_device_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(delta.jax, "default_backend", lambda: "tpu")
    with pytest.raises(InvalidParameterError, match="JAX runs on tpu"):
        delta.find_baselines(DeltaSettings(against="torch"), tmp_path)
