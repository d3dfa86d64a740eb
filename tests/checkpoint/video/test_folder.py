"""A video model's folder: both layouts are recognised, weights have the original's names, missing parts are named."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.video_folder import CLIP, CONFIG, SHAPES, T5, VAE, tensors, write_original
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import original_transformer, wan_vae_names
from verax.errors import CheckpointError, UnsupportedModelError

_TRANSFORMER = "transformer/*.safetensors"


@pytest.fixture
def original(tmp_path):
    return write_original(tmp_path / "SkyReels-V2-I2V-1.3B")


@pytest.fixture
def diffusers(original):
    return convert(VideoFolder(original), original.parent / "diffusers", "diffusers")


def assert_holds(opened, part):
    checkpoint, expected = opened.checkpoint(part), tensors(part)
    assert set(checkpoint.names()) == set(expected)
    for name, array in expected.items():
        assert (name, checkpoint.shape(name)) == (name, array.shape)
        assert checkpoint.read(name).dtype == checkpoint.info(name).dtype == array.dtype
        assert checkpoint.read(name).tobytes() == array.tobytes(), name
        checkpoint.release(name)


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_every_part_has_the_originals_names(layout, request):
    opened = VideoFolder(request.getfixturevalue(layout))
    assert opened.layout == layout
    assert opened.pipeline == "SkyReelsV2ImageToVideoPipeline"
    for part in SHAPES:
        assert part in opened
        assert_holds(opened, part)
    assert (opened.tokenizer / "tokenizer.json").is_file()
    assert opened.scheduler["flow_shift"] == 5


def test_a_folder_of_the_hubs_cache_has_the_name_of_its_repository(original):
    cached = original.parent / "models--Skywork--SkyReels-V2-DF-14B-540P" / "snapshots" / "0123abcd"
    cached.parent.mkdir(parents=True)
    original.rename(cached)
    assert VideoFolder(cached).name == "SkyReels-V2-DF-14B-540P"


def test_published_files_without_settings_have_the_published_ones(original):
    opened = VideoFolder(original)
    assert opened.config("text_encoder")["d_model"] == 4096
    assert opened.config("image_encoder")["hidden_size"] == 1280
    assert opened.config("vae")["base_dim"] == 96
    (original / f"{T5}.json").write_text('{"d_model": 4}')
    assert opened.config("text_encoder") == {"d_model": 4}


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("index", [False, True])
def test_numbered_files_are_one_transformer(stem, index, original):
    (original / "model.safetensors").unlink()
    weights = tensors("transformer")
    weight_map = {name: f"{stem}-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, original / file)
    if index:
        (original / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(VideoFolder(original), "transformer")
    (original / f"{stem}-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{stem}-00002-of-00003.safetensors missing"):
        VideoFolder(original).checkpoint("transformer")


def test_comfyuis_prefix_and_file_names_are_accepted(original):
    (original / "model.safetensors").unlink()
    prefixed = {f"model.diffusion_model.{name}": array for name, array in tensors("transformer").items()}
    save_file(prefixed, original / "skyreels_v2_i2v_fp32.safetensors")
    save_file({"decoder.1.weight": np.ones((2, 2), np.float32)}, original / "taew2_1.safetensors")
    (original / f"{VAE}.safetensors").rename(original / "wan_2.1_vae.safetensors")
    (original / f"{T5}.safetensors").rename(original / "umt5_xxl_bf16.safetensors")
    (original / f"{CLIP}.safetensors").rename(original / "clip_vision_h.safetensors")
    for part in SHAPES:
        assert_holds(VideoFolder(original), part)


@pytest.mark.parametrize("name", ["wan2.2_t2v_high_noise_14B_fp16.safetensors", "Wan2.2-I2V-A14B-LowNoise-Q8_0.gguf"])
def test_one_of_two_transformers_is_no_model_by_itself(name, original):
    (original / "wan2.2_t2v_high_noise_lora.safetensors").write_bytes(b"")
    assert_holds(VideoFolder(original), "transformer")
    (original / "model.safetensors").rename(original / name)
    with pytest.raises(CheckpointError, match=f"{name}: it is one of two transformers .* into high_noise_model/"):
        VideoFolder(original)


@pytest.mark.parametrize(
    "prefix",
    ["_orig_mod.", "module.", "diffusion_model.", "model.", "pipe.dit.", "module._orig_mod.model.diffusion_model."],
)
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_prefixes_and_wrappers_of_a_transformers_names_are_left_out(prefix, layout, original, diffusers):
    stored = load_file(original / "model.safetensors" if layout == "original" else next(diffusers.glob(_TRANSFORMER)))
    save_file({f"{prefix}{name}": array for name, array in stored.items()}, original / "model.safetensors")
    assert_holds(VideoFolder(original), "transformer")
    # A compiled block has the wrapper within its names.
    within = {name.replace("blocks.0.", "blocks.0._orig_mod."): array for name, array in stored.items()}
    save_file(within, original / "model.safetensors")
    assert_holds(VideoFolder(original), "transformer")
    name, array = next(iter(stored.items()))
    save_file(stored | {f"{prefix}{name}": array}, original / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} .*are both {name}"):
        VideoFolder(original).checkpoint("transformer")


def test_diffusers_names_in_a_folder_of_the_original_layout_are_known(original, diffusers):
    for part, stem in {"transformer": "model", "text_encoder": T5, "image_encoder": CLIP}.items():
        found = next((diffusers / part).glob("*.safetensors"))
        (original / f"{stem}.safetensors").write_bytes(found.read_bytes())
        assert_holds(VideoFolder(original), part)


def test_weights_that_no_part_needs_are_left_out(original):
    more = {"transformer": {"blocks.0.attn2.norm_added_q.weight": (4,), "blocks.0.cross_attn.norm_q_img.weight": (4,)}}
    more["image_encoder"] = {"textual.head.0.weight": (2, 2), "log_scale": (), "vision_model.position_ids": (1, 5)}
    for part, stem in {"transformer": "model", "image_encoder": CLIP}.items():
        extra = {name: np.ones(shape, np.float32) for name, shape in more[part].items()}
        save_file(tensors(part) | extra, original / f"{stem}.safetensors")
        assert_holds(VideoFolder(original), part)


def test_a_second_copy_of_the_text_encoders_embedding_is_left_out(diffusers):
    path = diffusers / "text_encoder" / "model.safetensors"
    expected = tensors("text_encoder")
    names = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
    names["blocks.0.attn.q.weight"] = "encoder.block.0.layer.0.SelfAttention.q.weight"
    stored = {names[name]: array for name, array in expected.items()}
    save_file(stored | {"encoder.embed_tokens.weight": stored["shared.weight"]}, path)
    assert_holds(VideoFolder(diffusers), "text_encoder")
    del stored["shared.weight"]
    save_file(stored | {"encoder.embed_tokens.weight": expected["token_embedding.weight"]}, path)
    assert_holds(VideoFolder(diffusers), "text_encoder")


def test_a_key_that_fits_no_name_is_kept_for_the_loader_to_report(diffusers):
    path = diffusers / "transformer" / "diffusion_pytorch_model.safetensors"
    checkpoint = VideoFolder(diffusers).checkpoint("transformer")
    stored = {name: np.ones(checkpoint.shape(name), np.float32) for name in ("blocks.0.self_attn.q.weight",)}
    save_file({"blocks.0.attn1.to_q.weight": stored["blocks.0.self_attn.q.weight"], "odd.key": np.ones(2)}, path)
    assert set(VideoFolder(diffusers).checkpoint("transformer").names()) == {"blocks.0.self_attn.q.weight", "odd.key"}


Q = "blocks.0.self_attn.q"


def scaled(original, **changes):
    """A transformer whose weight `Q` is of 8-bit floats, with other tensors next to it."""
    weights = tensors("transformer")
    weights[f"{Q}.weight"] = weights[f"{Q}.weight"].astype(ml_dtypes.float8_e4m3fn)
    more = {name.replace("Q__", f"{Q}__").replace("__", "."): array for name, array in changes.items()}
    save_file(weights | more, original / "model.safetensors")
    return weights[f"{Q}.weight"].astype(np.float32), VideoFolder(original)


@pytest.mark.parametrize("name", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("rows", [False, True])
def test_8_bit_floats_are_multiplied_by_their_scales(name, rows, original):
    scale = np.linspace(2, 3, len(tensors("transformer")[f"{Q}.weight"]) if rows else 1, dtype=np.float32)
    markers = {"scaled_fp8": np.zeros(2, ml_dtypes.float8_e4m3fn), "Q__scale_input": np.ones(1, np.float32)}
    values, folder = scaled(original, **{f"Q__{name}": scale}, **markers)
    checkpoint = folder.checkpoint("transformer")
    assert set(checkpoint.names()) == set(tensors("transformer"))
    np.testing.assert_array_equal(checkpoint.read(f"{Q}.weight").dequantize(), values * scale[:, None])
    floats = folder.checkpoint("transformer", quantized=False)
    np.testing.assert_array_equal(floats.read_raw(f"{Q}.weight"), values * scale[:, None])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"Q__scale_weight": np.ones(3, np.float32)}, "of 3 numbers cannot scale .* one scale, one for each row"),
        ({"head__scale_weight": np.ones(1, np.float32)}, r"head\.scale_weight has no head\.weight with it"),
        (
            {"blocks__1__self_attn__q__weight_scale": np.ones(1, np.float32)},
            "of dtype float32 .* expected 8-bit floats",
        ),
    ],
)
def test_scales_that_fit_no_weight_are_named(changes, says, original):
    with pytest.raises(CheckpointError, match=says):
        scaled(original, **changes)[1].checkpoint("transformer")


def test_weights_of_sparse_attention_are_refused(diffusers):
    path = next(diffusers.glob(_TRANSFORMER))
    save_file(load_file(path) | {"blocks.0.to_gate_compress.bias": np.zeros(8, np.float32)}, path)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.to_gate_compress\.bias is of video sparse attention"):
        VideoFolder(diffusers).checkpoint("transformer")


@pytest.mark.parametrize("place", ["tensor", "header"])
def test_comfyuis_rotated_weights_are_refused(place, original):
    weights = tensors("transformer")
    scale = np.ones((len(weights[f"{Q}.weight"]), 1), np.float32)
    weights |= {f"{Q}.weight": np.ones_like(weights[f"{Q}.weight"], np.int8), f"{Q}.weight_scale": scale}
    for rotated in (False, True):
        said = {"format": "int8_tensorwise", "convrot": rotated, "convrot_groupsize": 256}
        marker, metadata = {}, None
        if place == "tensor":
            marker = {f"{Q}.comfy_quant": np.frombuffer(json.dumps(said).encode(), np.uint8)}
        else:
            metadata = {"_quantization_metadata": json.dumps({"layers": {Q: said}})}
        save_file(weights | marker, original / "model.safetensors", metadata=metadata)
        if rotated:
            with pytest.raises(UnsupportedModelError, match="rotated weights are not supported"):
                VideoFolder(original).checkpoint("transformer")
        else:
            assert set(VideoFolder(original).checkpoint("transformer").names()) == set(tensors("transformer"))


@pytest.mark.parametrize(
    ("changes", "folder", "name"),
    [
        ({}, "SkyReels-V2-I2V-14B-540P", "SkyReelsV2ImageToVideoPipeline"),
        ({"model_type": "t2v"}, "SkyReels-V2-T2V-14B-540P", "SkyReelsV2Pipeline"),
        ({"model_type": "t2v"}, "SkyReels-V2-DF-14B-540P", "SkyReelsV2DiffusionForcingPipeline"),
        ({"model_type": "t2v", "inject_sample_info": True}, "mine", "SkyReelsV2DiffusionForcingPipeline"),
        ({"inject_sample_info": None}, "Wan2.1-I2V-14B-480P", "WanImageToVideoPipeline"),
        ({"inject_sample_info": None, "model_type": "flf2v"}, "Wan2.1-FLF2V-14B-720P", "WanImageToVideoPipeline"),
        ({"inject_sample_info": None, "_class_name": "VaceWanModel"}, "Wan2.1-VACE-1.3B", "WanVACEPipeline"),
        ({"model_type": "t2v", "inject_sample_info": None}, "Wan2.1-T2V-1.3B", "WanPipeline"),
    ],
)
def test_the_pipeline_is_known_from_settings_and_folder(changes, folder, name, tmp_path):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    assert VideoFolder(write_original(tmp_path / folder, config=config)).pipeline == name


def test_null_is_the_published_value_of_a_vaes_settings_and_other_types_are_refused():
    assert wan_vae_names({"num_res_blocks": None, "dim_mult": None})._rules == wan_vae_names({})._rules
    with pytest.raises(CheckpointError, match="num_res_blocks: expected"):
        wan_vae_names({"num_res_blocks": 10**9})


@pytest.mark.parametrize(
    ("part", "file"), [("transformer", "model"), ("vae", VAE), ("text_encoder", T5), ("image_encoder", CLIP)]
)
def test_a_missing_part_names_the_file_expected(part, file, original, diffusers):
    (original / f"{file}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{original}: .*expected {file}"):
        VideoFolder(original).checkpoint(part)
    next((diffusers / part).glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=f"{part}: no weights of the .*expected .*safetensors"):
        VideoFolder(diffusers).checkpoint(part)
    (diffusers / part / "config.json").unlink()
    (diffusers / part).rmdir()
    with pytest.raises(CheckpointError, match=f"expected {part}/config.json"):
        VideoFolder(diffusers).checkpoint(part)


@pytest.mark.parametrize(("key", "value"), [("in_channels", "16"), ("num_attention_heads", None)])
def test_a_transformers_size_of_another_type_is_refused_by_name(key, value, diffusers):
    config = VideoFolder(diffusers).config("transformer") | {key: value}
    with pytest.raises(CheckpointError, match=f"{key}: expected a whole number"):
        original_transformer(config, "SkyReelsV2ImageToVideoPipeline")


def test_other_faults_are_reported_with_what_would_be_right(original, diffusers, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        VideoFolder(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"expected model_index\.json .* or config\.json"):
        VideoFolder(tmp_path / "empty")
    (original / "google/umt5-xxl/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer: expected google/umt5-xxl/tokenizer\.json"):
        _ = VideoFolder(original).tokenizer
    save_file(tensors("vae"), original / "other_vae.safetensors")
    (original / f"{VAE}.safetensors").rename(original / "third_vae.safetensors")
    with pytest.raises(CheckpointError, match=r"several files for the video VAE: other_vae.*third_vae"):
        VideoFolder(original).checkpoint("vae")
    path = diffusers / "image_encoder" / "model.safetensors"
    prefix = "vision_model.encoder.layers.0.self_attn."
    save_file({f"{prefix}q_proj.weight": np.ones((4, 4)), f"{prefix}k_proj.weight": np.ones((4, 4))}, path)
    with pytest.raises(CheckpointError, match=f"{prefix}v_proj.weight missing"):
        VideoFolder(diffusers).checkpoint("image_encoder")
