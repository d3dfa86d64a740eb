"""Clips with weights in 8 bits: error, memory, LoRA files, and settings that are refused."""

import shutil
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.tiny_video import video_folder
from tests.support.video_gguf import WAN, of_blocks, weights_of, write_gguf, write_umt5
from verax import VideoPipeline
from verax.errors import InvalidParameterError
from verax.models.wan.model import WanModel
from verax.ops import quantize
from verax.plan import plan
from verax.plan.devices import find_device

CLIP: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2, output_type="np")
CPU = find_device("cpu", memory=8e9, bandwidth=1e10, flops=1e12)


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
    size = {name: CLIP[name] for name in ("height", "width", "num_frames")}
    planned, floats = plan(str(folder), CPU, quantization=quantization, **size), plan(str(folder), CPU, **size)
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


def test_files_of_8_bits_stay_so_and_lora_makes_floats_of_what_it_changes(folder, exact, tmp_path):
    shutil.copytree(folder, tmp_path / "fp8")
    path = tmp_path / "fp8" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    names = [name for name, weight in weights.items() if name.startswith("blocks.") and weight.ndim == 2]
    for name in names:
        scale = np.abs(weights[name]).max() / np.float32(448)
        weights[name] = (weights[name] / scale).astype(ml_dtypes.float8_e4m3fn)
        weights[f"{name.removesuffix('weight')}scale_weight"] = scale.reshape(1)
    save_file(weights, path)
    size = {name: CLIP[name] for name in ("height", "width", "num_frames")}

    def held(**options):
        """Dtypes of the blocks' matrices that are quantised, and the bytes of the transformer."""
        component = pipeline(tmp_path / "fp8", **options).denoiser.transformer
        with component.weights() as arrays:
            assert [(one.shape, one.dtype) for one in arrays] == [(one.shape, one.dtype) for one in component.shapes]
            return [one.dtype for one in arrays].count(jnp.float8_e4m3fn), component.size

    count, nbytes = held()
    assert count == len(names)
    parts = plan(str(tmp_path / "fp8"), CPU, **size)["weights"]
    assert nbytes == next(row["nbytes"] for row in parts if row["part"] == "transformer")
    frames = pipeline(tmp_path / "fp8")("a red circle", **CLIP).frames
    assert -10 * np.log10(np.mean((frames - exact) ** 2)) > 35
    shape = weights[names[0]].shape
    stem = f"diffusion_model.{names[0].removesuffix('.weight')}"
    changes = {"lora_down": np.ones((1, shape[1]), np.float32), "lora_up": np.ones((shape[0], 1), np.float32)}
    save_file({f"{stem}.{role}.weight": array for role, array in changes.items()}, tmp_path / "lora.safetensors")
    lora = {"lora": tmp_path / "lora.safetensors"}
    assert held(**lora)[0] == len(names) - 1
    assert held(**lora, quantization="fp8")[0] == len(names)
    assert held(quantization="dequantize")[0] == held(quantization="int8")[0] == held(dtype="float32")[0] == 0


def test_gguf_files_and_a_vae_are_a_model(folder, tmp_path):
    write_gguf(tmp_path / "wan-Q8_0.gguf", weights_of(WanModel, WAN), "Q8_0", architecture="wan", matrices=of_blocks)
    write_umt5(tmp_path / "umt5-xxl-encoder-Q8_0.gguf")
    shutil.copy(folder / "vae" / "diffusion_pytorch_model.safetensors", tmp_path / "Wan2.1_VAE.safetensors")
    shutil.copy(folder / "vae" / "config.json", tmp_path / "Wan2.1_VAE.json")
    stored, floats = pipeline(tmp_path), pipeline(tmp_path, quantization="dequantize", dtype="float32")
    frames, expected = (pipe("a red circle", **CLIP).frames for pipe in (stored, floats))
    assert -10 * np.log10(np.mean((frames - expected) ** 2)) > 35
    assert stored.denoiser.transformer.size < 0.4 * floats.denoiser.transformer.size


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
    with pytest.raises(InvalidParameterError, match=message):
        plan(str(folder), CPU, height=16, width=32, num_frames=9, **options)
