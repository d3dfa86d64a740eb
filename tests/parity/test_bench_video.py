"""The other sides of the video benchmark compute the same from the same weights."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from verax.bench.results import markdown
from verax.bench.settings import VideoSettings
from verax.bench.video import cases as bench


@pytest.fixture(autouse=True)
def _no_measurement_of_the_machine(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: {"matmul_float32_gflop_per_s": 400})


def bench_tiny(against, stages, **changes):
    settings = dict(frames=[5], height=16, width=16, dtype="float32", layers=1, runs=1, warmup=0)
    return bench.bench_video(VideoSettings(size="tiny", stage=stages, against=against, **{**settings, **changes}))


def test_every_stage_has_the_result_of_diffusers():
    result = bench_tiny(["diffusers"], ["transformer", "vae", "text"])
    assert [set(case["sides"]) for case in result["cases"]] == [{"verax", "diffusers"}] * 3
    assert max(case["sides"]["diffusers"]["difference"] for case in result["cases"]) < 1e-4
    assert {"torch", "diffusers", "transformers"} <= set(result["machine"])
    assert result["name"].startswith("tiny-1-layers-transformer-")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_openvino_has_the_result_of_the_stages_that_it_can_run(dtype, monkeypatch):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'verax[openvino]'")
    monkeypatch.setattr("verax.machine.measure_machine", lambda: {f"matmul_{dtype}_gflop_per_s": 400})
    result = bench_tiny(["openvino"], ["transformer", "vae", "text"], dtype=dtype)
    assert [set(case["sides"]) for case in result["cases"]] == [{"verax", "openvino"}, {"verax"}, {"verax", "openvino"}]
    bound = {"float32": 1e-4, "bfloat16": 0.2}[dtype]  # it rounds the angles of a timestep to bfloat16
    assert all(case["sides"]["openvino"]["difference"] < bound for case in result["cases"] if case["ratios"])
    assert "openvino" in result["machine"]
    assert "| text encoder, 512 tokens | 5 | openvino |" in markdown(result)


def test_pytorch_compiles_the_decoder():
    result = bench_tiny(["torch.compile"], ["vae"])
    assert result["cases"][0]["sides"]["torch.compile"]["difference"] < 1e-4
