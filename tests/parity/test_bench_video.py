"""The other side of the video benchmark computes the same from the same weights."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from verax.bench.results import write
from verax.bench.video import run as bench


def test_every_stage_has_the_result_of_diffusers(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure_machine", lambda: {"matmul_float32_gflop_per_s": 400})
    settings = dict(frames=[5], height=16, width=16, dtype="float32", layers=1, runs=1, warmup=0)
    result = bench.bench_video(size="tiny", stages=["transformer", "vae", "text"], against=["diffusers"], **settings)
    assert [set(case["sides"]) for case in result["cases"]] == [{"verax", "diffusers"}] * 3
    assert max(case["difference"] for case in result["cases"]) < 1e-4
    assert {"torch", "diffusers", "transformers"} <= set(result["machine"])
    assert "-video-tiny-1-layers-transformer-" in write(result, tmp_path).name
