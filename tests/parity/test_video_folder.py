"""Folders that diffusers saves: read by the original's names, converted both ways bit for bit, loaded by diffusers."""

import json
import shutil
from typing import NamedTuple

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection, UMT5Config, UMT5EncoderModel

from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import EXPERTS

SIZES = dict(num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2)
IMAGE = dict(in_channels=36, out_channels=16, image_dim=16, added_kv_proj_dim=24)
CLIP = dict(hidden_size=16, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28)


def reset(module, seed):
    """Weights with spread, of the module's own dtype."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


class Kind(NamedTuple):
    """Class of the pipeline, settings of its transformers and VAE, class of its image encoder, model_index.json."""

    pipeline: str
    transformer: dict
    vae: dict = {}
    vision: type | None = None
    index: dict = {}


LARGE_VAE = dict(is_residual=True, patch_size=2, in_channels=12, out_channels=12)
KINDS = {
    "i2v": Kind("SkyReelsV2ImageToVideoPipeline", IMAGE, vision=CLIPVisionModelWithProjection),
    "df": Kind(
        "SkyReelsV2DiffusionForcingPipeline",
        dict(in_channels=16, out_channels=16, inject_sample_info=True),
        dict(dim_mult=[1, 1, 2], temperal_downsample=[False, True]),
    ),
    "wan": Kind("WanImageToVideoPipeline", IMAGE, vision=CLIPVisionModel),
    "experts": Kind("WanImageToVideoPipeline", dict(in_channels=36, out_channels=16), index={"boundary_ratio": 0.8}),
    "flf2v": Kind("WanImageToVideoPipeline", dict(IMAGE, pos_embed_seq_len=10), vision=CLIPVisionModel),
    "vace": Kind("WanVACEPipeline", dict(in_channels=16, out_channels=16, vace_layers=[0, 1], vace_in_channels=96)),
    "5b": Kind("WanPipeline", dict(in_channels=16), LARGE_VAE, index={"expand_timesteps": True}),
}


def architecture_of(pipeline):
    """Class of a pipeline's transformers."""
    if "VACE" in pipeline:
        return WanVACETransformer3DModel
    return WanTransformer3DModel if pipeline.startswith("Wan") else SkyReelsV2Transformer3DModel


def models(kind):
    """Random models of a pipeline by name."""
    pipeline, transformer, vae, vision, index = KINDS[kind]
    architecture = architecture_of(pipeline)
    names = EXPERTS if "boundary_ratio" in index else ["transformer"]
    parts = {name: architecture(**SIZES, **transformer, rope_max_seq_len=32) for name in names}
    parts["vae"] = AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1, **vae)
    text = UMT5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    parts["text_encoder"] = UMT5EncoderModel(text).bfloat16()
    if vision is not None:
        parts["image_encoder"] = vision(CLIPVisionConfig(**CLIP, patch_size=14, projection_dim=8, hidden_act="gelu"))
    return {name: reset(model, seed) for seed, (name, model) in enumerate(parts.items())}


def save_folder(folder, kind):
    parts = models(kind)
    for name, model in parts.items():
        model.save_pretrained(folder / name)
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=7.0).save_pretrained(
        folder / "scheduler"
    )
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer" / "spiece.model").write_bytes(b"\0\1\2")
    if "image_encoder" in parts:
        (folder / "image_processor").mkdir()
        (folder / "image_processor" / "preprocessor_config.json").write_text('{"crop_size": 28}')
    index = {"_class_name": KINDS[kind].pipeline, **KINDS[kind].index}
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "diffusers"
    save_folder(path, request.param)
    return path


@pytest.fixture(scope="module")
def there(folder):
    """The models in the original layout."""
    return convert(VideoFolder(folder), folder.parent / "original", "original")


@pytest.fixture(scope="module")
def back(there):
    """And back in diffusers'."""
    return convert(VideoFolder(there), there.parent / "again", "diffusers")


def weights(folder):
    """All of a folder's parts by name, as stored."""
    return {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}


def assert_equal(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (name, got[name].dtype, got[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(got[name], tensor), name


def test_there_and_back_every_bit_is_the_same(folder, there, back, tmp_path):
    again = convert(VideoFolder(back), tmp_path / "third", "original")
    expected, got = weights(folder), weights(back)
    assert set(got) == set(expected)
    for path, tensors in expected.items():
        # transformers 5 saves CLIPVisionModel without the prefix that published files have.
        bare = "image_encoder" in path and not any(name.startswith("vision_model.") for name in tensors)
        assert_equal({name.removeprefix("vision_model." if bare else ""): t for name, t in got[path].items()}, tensors)
    for path, tensors in weights(there).items():
        assert_equal(weights(again)[path], tensors)


def test_there_and_back_all_else_is_the_same(folder, back):
    assert (back / "tokenizer/spiece.model").read_bytes() == (folder / "tokenizer/spiece.model").read_bytes()
    configs = [path.relative_to(folder) for path in folder.glob("*/*config.json")]
    assert len(configs) >= 4
    for path in configs:
        ours, theirs = (json.loads((at / path).read_text()) for at in (back, folder))
        assert all(key.startswith("_") or ours[key] == theirs[key] for key in theirs), path
    for name in ("pipeline", "boundary_ratio", "expand_timesteps"):
        assert getattr(VideoFolder(back), name) == getattr(VideoFolder(folder), name)


def test_diffusers_loads_what_is_converted_back(folder, back):
    wan = VideoFolder(folder).pipeline.startswith("Wan")
    transformer = architecture_of(VideoFolder(folder).pipeline)
    kinds = {name: transformer for name in EXPERTS if name in VideoFolder(folder)}
    for name, kind in {**kinds, "vae": AutoencoderKLWan}.items():
        model = kind.from_config(kind.load_config(back / name))
        model.load_state_dict(load_file(back / name / "diffusion_pytorch_model.safetensors"), strict=True)
        assert_equal(model.state_dict(), load_file(folder / name / "diffusion_pytorch_model.safetensors"))
    ours, theirs = (UMT5EncoderModel.from_pretrained(at / "text_encoder", dtype="auto") for at in (back, folder))
    assert_equal(ours.state_dict(), theirs.state_dict())
    if (folder / "image_encoder").is_dir():
        kind = CLIPVisionModel if wan else CLIPVisionModelWithProjection
        ours, theirs = (kind.from_pretrained(at / "image_encoder") for at in (back, folder))
        assert_equal(ours.state_dict(), theirs.state_dict())


def test_the_originals_pth_files_give_the_same_weights(there, tmp_path):
    plain = VideoFolder(there)
    shutil.copytree(there, tmp_path / "pickled")
    names = [name for name in ("vae", "text_encoder", "image_encoder") if name in plain]
    for path in (tmp_path / "pickled").glob("*.safetensors"):
        if not path.name.startswith("diffusion"):
            more = {"textual.token.weight": torch.ones(2), "log_scale": torch.ones(())} if "clip" in path.name else {}
            torch.save({**load_file(path), **more}, path.with_suffix(".pth"))
            path.unlink()
    pickled = VideoFolder(tmp_path / "pickled")
    for name in names:
        ours, expected = pickled.checkpoint(name), plain.checkpoint(name)
        assert sorted(ours.names()) == sorted(expected.names())
        for key in expected.names():
            assert ours.read(key).tobytes() == expected.read(key).tobytes(), key
        assert pickled.config(name) == plain.config(name)
