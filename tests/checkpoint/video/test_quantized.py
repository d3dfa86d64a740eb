"""Quantised files of video models: 8-bit floats and integers with scales, and GGUF files in their published layouts."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.support.video_gguf import UMT5, WAN, is_umt5_matrix, of_blocks, weights_of, write_gguf, write_umt5
from verax.checkpoint.video.folder import VideoFolder, is_video_folder
from verax.checkpoint.video.parts import WAN as WAN_NAMES
from verax.errors import CheckpointError, UnsupportedModelError
from verax.loading import load_weights, quantized_shapes
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig, WanModel
from verax.ops import BlockQuantizedWeight, QuantizedWeight

BLOCKS = ("Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K")
EXPANDED = ("Q3_K", "BF16")


def original(folder: Path) -> VideoFolder:
    folder.mkdir(exist_ok=True)
    (folder / "Wan2.1_VAE.safetensors").write_bytes(b"")
    return VideoFolder(folder)


def loaded(folder, name, kind, config):
    """Weights of a part as a pipeline holds them, by name, checked against the shapes that the headers give."""
    abstract = nnx.eval_shape(lambda: kind(config, dtype=np.float32, rngs=nnx.Rngs(0)))
    opened = folder.checkpoint(name)
    expected = nnx.to_flat_state(nnx.state(quantized_shapes(abstract, opened.packed)))
    leaves = nnx.to_flat_state(nnx.state(load_weights(abstract, opened)))
    assert nnx.to_flat_state(nnx.state(abstract)).paths == leaves.paths
    for (_, shapes), (_, leaf) in zip(expected, leaves, strict=True):
        assert type(shapes.get_value()) is type(leaf.get_value()) or not hasattr(leaf.get_value(), "dequantize")
        assert shapes.get_value().shape == leaf.get_value().shape
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in leaves}


def assert_equal(held, stored, quantized):
    assert held.keys() == stored.keys()
    kinds = {name: type(weight) for name, weight in held.items() if hasattr(weight, "dequantize")}
    assert set(kinds) == quantized
    for name, weight in held.items():
        floats = np.asarray(weight.dequantize() if name in kinds else weight)
        np.testing.assert_array_equal(floats, stored[name], err_msg=name)


@pytest.mark.parametrize("kind", [*BLOCKS, *EXPANDED])
def test_blocks_of_a_transformer_stay_as_a_gguf_file_has_them(kind, tmp_path):
    weights = weights_of(WanModel, WAN)
    stored = write_gguf(tmp_path / f"wan-{kind}.gguf", weights, kind, architecture="wan", matrices=of_blocks)
    quantized = {name for name, weight in weights.items() if of_blocks(name, weight)} if kind in BLOCKS else set()
    held = loaded(original(tmp_path), "transformer", WanModel, WAN)
    assert_equal(held, stored, quantized)
    assert all(isinstance(held[name], BlockQuantizedWeight) for name in quantized)


@pytest.mark.parametrize("written", ["sd.cpp", "orig_shape", "diffusers", "embeddings"])
def test_the_layouts_of_both_programs_are_read(written, tmp_path):
    weights = weights_of(WanModel, WAN)
    kernel, options = "patch_embedding.weight", {"architecture": "wan", "matrices": of_blocks}
    flat = dict(weights)
    if written == "sd.cpp":
        flat[kernel] = weights[kernel].reshape(-1, *weights[kernel].shape[2:])
        options |= {"architecture": None, "rename": lambda name: f"model.diffusion_model.{name}"}
    elif written == "orig_shape":
        flat[kernel] = weights[kernel].reshape(-1, 256)
        options["metadata"] = [("add_array", f"comfy.gguf.orig_shape.{kernel}", list(weights[kernel].shape))]
    elif written == "diffusers":
        options["rename"] = lambda name: WAN_NAMES.forward(name)[0]
    elif written == "embeddings":
        options["matrices"] = lambda name, weight: weight.ndim == 2
    stored = write_gguf(tmp_path / "wan.gguf", flat, "Q8_0", **options)
    stored[kernel] = weights[kernel]
    held = loaded(original(tmp_path), "transformer", WanModel, WAN)
    assert_equal(held, stored, {name for name, weight in weights.items() if of_blocks(name, weight)})


@pytest.mark.parametrize(
    ("config", "pipeline"),
    [
        (WAN, "WanPipeline"),
        (replace(WAN, in_dim=36), "WanImageToVideoPipeline"),
        (replace(WAN, in_dim=36, image_dim=64), "WanImageToVideoPipeline"),
        (replace(WAN, in_dim=36, image_dim=64, image_positions=10), "WanImageToVideoPipeline"),
        (replace(WAN, num_layers=6, vace_layers=(0, 3)), "WanVACEPipeline"),
    ],
    ids=["t2v", "i2v-a14b", "i2v", "flf2v", "vace"],
)
def test_a_transformer_without_config_json_is_described_by_its_shapes(config, pipeline, tmp_path):
    weights = weights_of(WanModel, config)
    write_gguf(tmp_path / "wan.gguf", weights, "Q8_0", architecture="wan", matrices=of_blocks)
    folder = original(tmp_path)
    assert WanConfig.from_hf(folder.config("transformer")) == config
    assert folder.pipeline == pipeline
    assert is_video_folder(tmp_path)
    assert loaded(folder, "transformer", WanModel, config).keys() == weights.keys()


@pytest.mark.parametrize("llama_cpp", [True, False])
def test_umt5_is_read_by_llama_cpps_names_or_its_own(llama_cpp, tmp_path):
    weights, path = weights_of(UMT5EncoderModel, UMT5), tmp_path / "umt5-xxl-encoder-Q8_0.gguf"
    if llama_cpp:
        stored = write_umt5(path)
    else:
        stored = write_gguf(path, weights, "Q8_0", architecture=None, matrices=is_umt5_matrix)
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel"}')
    folder = original(tmp_path)
    if llama_cpp:
        described = UMT5Config.from_hf(folder.config("text_encoder"))
        assert described.layer_norm_epsilon == np.float32(UMT5.layer_norm_epsilon)
        assert replace(described, layer_norm_epsilon=UMT5.layer_norm_epsilon) == UMT5
    quantized = {name for name, weight in weights.items() if is_umt5_matrix(name, weight)}
    assert_equal(loaded(folder, "text_encoder", UMT5EncoderModel, UMT5), stored, quantized)


def test_a_gguf_file_of_another_model_is_refused_before_weights_are_read(tmp_path):
    weights = {"w": np.ones((2, 32), np.float32)}
    write_gguf(tmp_path / "flux.gguf", weights, "F32", architecture="flux", matrices=of_blocks)
    folder = original(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"architecture 'flux' is not a transformer .* expected 'wan'"):
        folder.config("transformer")
    (tmp_path / "flux.gguf").unlink()
    write_gguf(tmp_path / "a.gguf", weights, "F32", architecture="wan", matrices=of_blocks)
    with pytest.raises(CheckpointError, match=r"a\.gguf: not a Wan transformer, .* 'patch_embedding\.weight' missing"):
        folder.config("transformer")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("float8_e4m3fn", shape) for shape in ("tensor", "row", "block", "none")),
        *(("int8", shape) for shape in ("tensor", "row", "block")),
        *(("float8_e5m2", shape) for shape in ("row", "block", "none")),
    ],
)
def test_8_bit_weights_stay_so_with_scales_of_a_tensor_a_row_or_a_block(dtype, shape, tmp_path):
    weights = weights_of(WanModel, WAN)
    files, stored, draw = {}, {}, np.random.default_rng(1)
    for name, weight in weights.items():
        files[name] = stored[name] = weight
        if of_blocks(name, weight):
            integers = draw.integers(-99, 99, weight.shape)
            files[name] = integers.astype(dtype if dtype == "int8" else getattr(ml_dtypes, dtype))
            F, D = weight.shape
            sizes = {"tensor": (), "row": (F, 1), "block": (-(-F // 128), -(-D // 128)), "none": ()}
            scale = np.asarray(draw.uniform(1, 2, sizes[shape]), np.float32)
            if shape == "none":
                scale = np.float32(1)
            else:
                files[f"{name.removesuffix('weight')}weight_scale"] = scale
            grid = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:F, :D] if shape == "block" else scale
            stored[name] = files[name].astype(np.float32) * grid
    save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel"}')
    floats = dtype == "float8_e5m2" or (dtype, shape) == ("int8", "block")
    kept = set() if floats else {name for name, weight in weights.items() if of_blocks(name, weight)}
    held = loaded(original(tmp_path), "transformer", WanModel, WAN)
    assert_equal(held, stored, kept)
    assert all(isinstance(held[name], QuantizedWeight) for name in kept)
