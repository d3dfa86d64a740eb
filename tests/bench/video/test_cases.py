"""The video benchmark: its numbers fit together, and wrong settings are refused before any work."""

import os
import sys

import pytest

from verax import builtin
from verax.bench.harness import count_products
from verax.bench.results import markdown
from verax.bench.settings import VideoSettings
from verax.bench.video import cases as video
from verax.bench.video.cases import SIZES, work
from verax.errors import InvalidParameterError

CLIP = dict(height=16, width=32)


def measure(**changes):
    return video.bench_video(VideoSettings(**{**dict(size="tiny", frames=[5], **CLIP), **changes}))


def test_a_stage_is_timed_and_compared_with_the_limit():
    # The VAE, whose program takes the longest to compile, is in tests/parity/test_bench.py.
    result = measure(stage="transformer", layers=1, runs=2, warmup=0)
    assert [case["stage"] for case in result["cases"]] == ["transformer"]
    for case in result["cases"]:
        side = case["sides"]["verax"]
        assert len(side["seconds"]) == 2
        assert case["fraction_of_limit"] == pytest.approx(case["flops"] / side["median_s"] / 900e9)
        assert min(case["compile_cached_s"], case["compile_s"]) > 0
    assert result["name"] == "tiny-1-layers-transformer-bfloat16-5x16x32"
    assert "| transformer, a forward pass, 5 frames | **verax** |" in markdown(result)


def test_products_follow_the_formula():
    todo = work("transformer", 9, VideoSettings(size="tiny", height=32, width=64, dtype="float32", layers=1))
    T, D, F = 3 * 2 * 4, 32, SIZES["tiny"]["transformer"]["ffn_dim"]
    matmuls = 2 * T * (6 * D * D + 2 * D * F)  # keys of the context are computed once, not in a forward pass
    attention = 4 * D * T * (T + 512 + 257)
    products = count_products(todo.run, todo.component.shapes, *todo.shapes)
    assert products == pytest.approx(matmuls + attention, rel=0.15)  # and embeddings, head


CLIPS = dict(stage="clip", layers=1, text_layers=1, steps=1, runs=1, warmup=0)

STABLE_DIFFUSION_CPP = """
from pathlib import Path
from PIL import Image
__version__ = "0.0"
class StableDiffusion:
    def __init__(self, *, diffusion_model_path, t5xxl_path, vae_path, n_threads, **_):
        assert all(Path(path).is_file() for path in (diffusion_model_path, t5xxl_path, vae_path))
    def generate_video(self, *, video_frames, height, width, sample_steps, cfg_scale, **_):
        assert (sample_steps, cfg_scale) == (1, 1.0)
        print("[INFO ] sampling completed, taking 1.25s\\nwan_vae compute buffer size: 12.50 MB(RAM)")
        return [Image.new("RGB", (width, height))] * video_frames
"""


def test_clips_are_made_in_a_process_of_each_side(tmp_path, monkeypatch):
    (tmp_path / "stable_diffusion_cpp.py").write_text(STABLE_DIFFUSION_CPP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    peer = dict(against="stable-diffusion.cpp", peer_python=sys.executable)
    result = measure(**CLIPS, **peer, variants="int8")
    (case,) = result["cases"]
    assert list(case["sides"]) == ["verax", "verax int8", "stable-diffusion.cpp", "stable-diffusion.cpp Q8_0"]
    ours, int8, theirs = list(case["sides"].values())[:3]
    assert 20 < int8["psnr"] < 60
    assert len(ours["seconds"]) == 1
    assert ours["median_s"] > sum(ours["stages"].values()) > 0
    assert min(ours["peak_bytes"], ours["decode_bytes"]) > 0
    assert theirs["stages"] == {"denoise": 1.25}
    assert (theirs["decode_bytes"], theirs["peak_bytes"] > 0) == (12_500_000, True)
    assert result["machine"]["stable-diffusion.cpp"] == "0.0"


def test_the_cost_of_a_cache_is_shown_for_a_checkpoint_by_threshold(tmp_path):
    (tmp_path / "prompts").write_text("a red circle\n\na blue square\n")
    options = dict(stage="clip", model=str(builtin.video_model()), prompts=tmp_path / "prompts", warmup=0, runs=2)
    sizes = dict(frames="5", height=32, width=32, steps=8, guidance_scale=5.0)
    result = measure(**options, **sizes, variants="magcache", thresholds="0.0001,0.24")
    exact, cached = (result["cases"][0]["sides"][f"verax magcache {value}"] for value in ("0.0001", "0.24"))
    assert (exact["computed"], exact["psnr"], exact["worst_ssim"]) == ("8 of 8", None, 1.0)
    assert int(cached["computed"].split()[0]) < 8
    assert 15 < cached["worst_psnr"] < cached["psnr"] < 60
    assert result["name"].startswith("video-clip-8-steps-5-bfloat16-5x32x32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"against": "stable-diffusion.cpp"}, "peer_python: none"),
        ({"against": "openvino"}, "against"),
        ({"variants": "taylorseer"}, "variants: expected int8"),
        ({"variants": "int8", "thresholds": "0.1"}, "thresholds: none of the variants has a cache"),
        (
            {"model": "a", "against": "stable-diffusion.cpp"},
            "model: stable-diffusion.cpp is measured with random weights",
        ),
        ({"frames": "5,9"}, "one number of frames"),
        ({"stage": "vae", "against": "stable-diffusion.cpp"}, "measured with the stage clip"),
        ({"stage": "clip,vae"}, "clip is measured by itself"),
    ],
)
def test_settings_of_clips_that_cannot_be_measured_are_refused(changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        measure(**{**CLIPS, **changes})


@pytest.mark.parametrize(
    ("compile_s", "ours", "first", "theirs", "calls"),
    [(3, 1, 2, 2, 4), (0.5, 1, 2, 2, 1), (3, 1, 4, 2, 2), (3, 2, 2, 2, None), (0, 1, 9, 2, 1)],
)
def test_calls_until_compiling_has_paid(compile_s, ours, first, theirs, calls):
    assert video.break_even(compile_s, ours, first, theirs) == calls
    if calls is not None:
        assert compile_s + calls * ours < first + (calls - 1) * theirs
        assert calls == 1 or compile_s + (calls - 1) * ours >= first + (calls - 2) * theirs
