"""The video benchmark: what it tells fits together, and wrong settings are refused before any work."""

import numpy as np
import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.bench import video as bench
from verax.bench.report import markdown, write
from verax.bench.video_cache import bench_teacache
from verax.bench.video_work import SIZES, products, work
from verax.errors import InvalidParameterError

LIMITS = {"matmul_float32_gflop_per_s": 400, "matmul_bfloat16_gflop_per_s": 900}
CLIP = dict(height=16, width=32)


@pytest.fixture(autouse=True)
def _no_measurement_of_the_machine(monkeypatch):
    monkeypatch.setattr(bench, "measure_machine", lambda: LIMITS)


def test_stages_are_timed_and_memory_is_told_by_form(tmp_path):
    settings = dict(frames=[5], memory=["standard", "chunked"], runs=2, warmup=0)
    result = bench.bench_video(size="tiny", stages=["transformer", "vae"], **CLIP, **settings)
    assert [case["stage"] for case in result["cases"]] == ["transformer", "vae"]
    for case in result["cases"]:
        side = case["sides"]["verax"]
        assert len(side["seconds"]) == 2
        assert case["fraction_of_limit"] == pytest.approx(case["products"] / side["median_s"] / 900e9)
        assert min(case["compile_cached_s"], case["compile_s"]) > 0
    assert [row["attention"] for row in result["forms_memory"]] == ["standard", "chunked"]
    assert all(row["peak_gb"] > row["weights_gb"] > 0 for row in result["forms_memory"])
    path = write(result, tmp_path)
    assert path.name.endswith("-video-tiny-transformer-vae-bfloat16-5x16x32.json")
    assert "| VAE, decoding | 5 | verax |" in markdown(result)


def test_products_are_those_of_the_formula():
    config = SIZES["tiny"].transformer
    todo = work("transformer", "tiny", frames=9, height=32, width=64, dtype="float32", layers=1)
    T, D, F = 3 * 2 * 4, config.dim, config.ffn_dim
    matmuls = 2 * T * (6 * D * D + 2 * D * F)  # keys of the context are computed once, not in a forward pass
    attention = 4 * D * T * (T + 512 + 257)
    assert products(todo) == pytest.approx(matmuls + attention, rel=0.35)  # and norms, softmax, embeddings, head


def test_what_teacache_costs_is_told_by_threshold(tmp_path, monkeypatch):
    made, call = [], VideoPipeline.__call__

    def recorded(pipe, prompt, **options):
        made.append((prompt, options["cache"], options.get("seed"), call(pipe, prompt, **options)))
        return made[-1][-1]

    monkeypatch.setattr(VideoPipeline, "__call__", recorded)
    settings = dict(height=16, width=32, num_frames=9, num_inference_steps=8, guidance_scale=1.0)
    folder = video_folder("t2v", tmp_path / "tiny")
    result = bench_teacache(
        str(folder), prompts=["a red circle", "a blue square"], thresholds=[1e9], seed=3, **settings
    )
    assert [one[:3] for one in made[2:]] == [
        (prompt, cache, seed)
        for prompt, seed in (("a red circle", 3), ("a blue square", 4))
        for cache in (None, "teacache")
    ]
    row = result["thresholds"][0]
    assert (result["settings"]["steps"], row["computed"]) == (8, 5)
    for (*_, whole), (*_, cached), psnr in zip(made[2::2], made[3::2], row["psnr"], strict=True):
        assert psnr == pytest.approx(10 * np.log10(255**2 / np.mean((whole.frames - cached.frames.astype(float)) ** 2)))
    assert "2 clips of 9 frames of 16 x 32" in markdown(result)
    assert "| 1e+09 | 5 of 8 |" in markdown(result)
    assert write(result, tmp_path).name.endswith("-teacache-tiny.json")
    row["psnr"] = [None, None]
    assert "| no difference |" in markdown(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model="folder"), "prompts: expected some"),
        (dict(thresholds=[]), "thresholds: expected one or more"),
    ],
)
def test_a_measurement_of_teacache_without_prompts_or_thresholds_is_refused(changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        bench_teacache(**changes)


@pytest.mark.parametrize(
    ("compile_s", "ours", "first", "theirs", "calls"),
    [(3, 1, 2, 2, 4), (0.5, 1, 2, 2, 1), (3, 1, 4, 2, 2), (3, 2, 2, 2, None), (0, 1, 9, 2, 1)],
)
def test_calls_until_compiling_has_paid(compile_s, ours, first, theirs, calls):
    assert bench.break_even(compile_s, ours, first, theirs) == calls
    if calls is not None:
        assert compile_s + calls * ours < first + (calls - 1) * theirs
        assert calls == 1 or compile_s + (calls - 1) * ours >= first + (calls - 2) * theirs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(size="2b"), "size: expected one of 1.3b"),
        (dict(stages=["unet"]), "stage: expected one of transformer"),
        (dict(frames=[8]), r"expected 4n \+ 1 frames"),
        (dict(height=20), "divisible by 16, got 5, 20 x 32"),
        (dict(attention="fast"), "attention: expected one of auto"),
        (dict(memory=["fast"]), "memory: expected one of auto"),
        (dict(against=["onnx"]), "against: expected one of diffusers"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        bench.bench_video(**{**dict(size="tiny", frames=[5], **CLIP), **changes})
