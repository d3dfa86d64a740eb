"""Clips with weights in 8 bits: error, memory, LoRA files, and settings that are refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.errors import InvalidParameterError
from verax.ops import quantize
from verax.plan.devices import find_device
from verax.plan.run import plan

CLIP: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2, output_type="np")


def pipeline(folder, **options):
    return VideoPipeline.from_pretrained(folder, show_progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return video_folder("df", tmp_path_factory.mktemp("df"), heads=8)


@pytest.fixture(scope="module")
def exact(folder):
    return pipeline(folder, dtype="float32")("a red circle", **CLIP).frames


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_quantised_clip_is_near_the_float32_one_in_the_memory_of_its_plan(quantization, folder, exact):
    pipe = pipeline(folder, quantization=quantization)
    frames = pipe("a red circle", **CLIP).frames
    assert -10 * np.log10(np.mean((frames - exact) ** 2)) > 35
    for component in pipe.parts.components:
        with component.weights() as weights:
            assert [(one.shape, one.dtype) for one in weights] == [(one.shape, one.dtype) for one in component.shapes]
    cpu = find_device("cpu", memory=8e9, bandwidth=1e10, flops=1e12)
    size = {name: CLIP[name] for name in ("height", "width", "num_frames")}
    planned, floats = plan(str(folder), cpu, quantization=quantization, **size), plan(str(folder), cpu, **size)
    assert planned["settings"]["quantization"] == quantization
    sizes = {row["part"]: row["nbytes"] for row in planned["weights"]}
    assert sizes == {one.name: one.size for one in pipe.parts.components}
    before = {row["part"]: row["nbytes"] for row in floats["weights"]}
    assert {name for name, size in sizes.items() if size < before[name]} == {"text encoder", "transformer"}


def test_lora_is_added_before_weights_are_quantised(folder, tmp_path):
    name, draw = "blocks.0.ffn.0.weight", np.random.default_rng(0)
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")[name]
    up, down = (draw.standard_normal(shape).astype(np.float32) for shape in ((len(stored), 2), (2, stored.shape[1])))
    stem = f"diffusion_model.{name.removesuffix('.weight')}"
    save_file({f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}, tmp_path / "lora.safetensors")
    pipe = pipeline(folder, quantization="fp8", dtype="float32", lora=tmp_path / "lora.safetensors")
    component = pipe.denoiser.transformer
    with component.weights() as weights:
        held = component.module(weights).blocks[0].ffn[0].weight.get_value()
    expected = quantize(jnp.asarray(stored + up @ down), 8, is_float=True)
    np.testing.assert_allclose(held.row_scales(), expected.row_scales(), rtol=1e-5)
    assert np.mean(np.asarray(held.values) == np.asarray(expected.values)) > 0.99  # the products' order differs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "quantization: expected one of int8, fp8, dequantize, got 'int3'"),
        (
            {"quantization": "int8", "devices": 2, "shard_weights": True},
            "shard_weights: quantised weights are not divided over devices; .* quantization='dequantize'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message, folder):
    cpu = find_device("cpu", memory=8e9, bandwidth=1e10, flops=1e12)
    with pytest.raises(InvalidParameterError, match=message):
        plan(str(folder), cpu, height=16, width=32, num_frames=9, **options)
