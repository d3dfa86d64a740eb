"""Wan 2.2's pipelines beyond parity: folders of either layout, one transformer in memory at a time, what is refused."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.tiny_video import BOUNDARY
from verax import VideoPipeline, VideoRequest
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models.wan.family import read_settings
from verax.serve.video.videos import VideoCreate, resolve
from verax.video import programs
from verax.video.load import describe_folder
from verax.video.pipeline import Previewer

STEPS = 8
OPTIONS: dict[str, Any] = dict(height=32, width=64, num_frames=5, num_inference_steps=STEPS, output_type="latent")


def picture(height=40, width=60):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_models_in_the_originals_layout_are_the_same(folders, pipes, tmp_path):
    files = {"ti2v": {"Wan2.2_VAE.safetensors"}, "i2v-a14b": {"high_noise_model", "low_noise_model"}}
    for kind, names in files.items():
        there = convert(VideoFolder(folders(kind)), tmp_path / kind, "original")
        assert {path.name for path in there.iterdir()} >= names
        ours = VideoPipeline.from_pretrained(there, dtype="float32", show_progress=False)
        assert ours.settings == pipes(kind).settings
        for one, other in zip(ours.parts.components, pipes(kind).parts.components, strict=True):
            with one.weights() as weights, other.weights() as expected:
                assert all(np.array_equal(*pair) for pair in zip(weights, expected, strict=True))


def test_large_transformers_are_in_memory_in_turn_and_make_the_same_clip(folders, pipes, monkeypatch):
    monkeypatch.setattr(programs, "KEEP_LIMIT", 0)
    pipe = VideoPipeline(folders("t2v-a14b"), dtype="float32", keep_encoders=False, show_progress=False)
    first, second = (denoiser.transformer for denoiser in pipe.parts.denoisers)
    seen = []
    made = pipe("a red circle", callback=lambda now: seen.append((first.loaded, second.loaded)), **OPTIONS)
    steps = list(dict.fromkeys(seen))
    assert steps[-2:] == [(True, False), (False, True)]
    assert (True, True) not in steps
    assert not first.loaded
    assert not second.loaded
    kept = pipes("t2v-a14b")("a red circle", **OPTIONS)
    np.testing.assert_allclose(made.frames, kept.frames, atol=1e-4)
    plan = [row for row in pipe.plan(VideoRequest("a red circle", **OPTIONS)) if row.stage == "denoise"]
    assert [row.others for row in plan] == [0, 0]


def test_each_transformer_has_its_scale_of_guidance(pipes):
    pipe, settings = pipes("t2v-a14b"), pipes("t2v-a14b").settings
    assert (settings.guidance_scale, settings.guidance_scale_2, settings.boundary_ratio) == (4.0, 3.0, BOUNDARY)
    for more, scales in (
        ({}, (4.0, 3.0)),
        ({"guidance_scale": 3.0}, (3.0, 3.0)),
        ({"guidance_scale": 3.0, "guidance_scale_2": 1.5}, (3.0, 1.5)),
    ):
        assert pipe.resolve(VideoRequest("a red circle", **more, **OPTIONS)).guidance_scales == scales


def query_weights(pipe):
    """Weight of the first block's queries in each transformer."""
    for denoiser in pipe.parts.denoisers:
        with denoiser.transformer.weights() as weights:
            yield np.asarray(denoiser.transformer.module(weights).blocks[0].self_attn.q.weight[...])


def test_each_transformer_has_files_and_factors_of_its_own_or_both_have_the_same(folders, pipes, tmp_path):
    rng = np.random.default_rng(0)
    changes, files = [], []
    for name in ("0", "1", "Style_HighNoise", "style_low_noise_lora"):
        up, down = (rng.normal(size=shape).astype(np.float32) for shape in ((24, 2), (2, 24)))
        files.append(tmp_path / f"{name}.safetensors")
        save_file({"lora_unet_blocks_0_self_attn_q.lora_up.weight": up}
                  | {"lora_unet_blocks_0_self_attn_q.lora_down.weight": down}, files[-1])  # fmt: skip
        changes.append(up.astype(np.float64) @ down)
    before = list(query_weights(pipes("t2v-a14b")))
    first, second, high, low = changes
    cases: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"lora": f"{files[0]}:0.5"}, (0.5 * first, 0.5 * first)),
        ({"lora": {files[0]: 0.5}, "lora_2": [f"{files[0]}:-1", files[1]]}, (0.5 * first, second - first)),
        ({"lora_2": files[1]}, (0 * first, second)),
        ({"lora": [f"{files[0]}:2", f"{files[1]}:3"], "lora_2": ()}, (2 * first + 3 * second, 0 * first)),
        ({"lora": files[1:]}, (second + high, second + low)),
        ({"lora": files[3], "lora_2": files[2]}, (low, high)),
    )
    for arguments, expected in cases:
        pipe = VideoPipeline(folders("t2v-a14b"), dtype="float32", show_progress=False, **arguments)
        for after, plain, change in zip(query_weights(pipe), before, expected, strict=True):
            np.testing.assert_allclose(after - plain, change, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("ti2v", {"lora_2": "a.safetensors"}, "lora_2: this model has one transformer"),
        ("t2v-a14b", {"lora": ["a.safetensors:1", "a.safetensors:2"]}, "lora: expected each file once"),
        ("ti2v", {"lora": ""}, "lora: expected the path of a LoRA file"),
        ("t2v-a14b", {"lora_2": {"a.safetensors": "much"}}, "lora_2: expected a number as the factor of a.safetensors"),
        ("t2v-a14b", {"lora_2": "a.safetensors:nan"}, "lora_2: expected a number as the factor of a.safetensors"),
    ],
)
def test_lora_arguments_that_make_no_sense_are_refused(kind, arguments, message, folders):
    with pytest.raises(InvalidParameterError, match=message):
        VideoPipeline(folders(kind), **arguments)


def test_teacache_works_with_an_image_whose_frame_has_its_own_time(pipes):
    options: dict[str, Any] = {**OPTIONS, "num_inference_steps": STEPS, "image": picture(), "guidance": "sequential"}
    cached = pipes("ti2v")("a red circle", cache="teacache", cache_threshold=1e9, **options)
    assert (cached.steps, cached.computed) == (STEPS, 5)


@pytest.mark.parametrize(("kind", "frames"), [("t2v-a14b", None), ("i2v-a14b", picture()), ("ti2v", picture())])
def test_the_server_takes_a_request_and_shows_its_latents(kind, frames, pipes):
    pipe = pipes(kind)
    more: dict[str, Any] = {} if kind == "ti2v" else {"guidance_scale_2": 2.0}
    body = VideoCreate("a red circle", size="64x32", num_frames=5, **more)
    last = frames if kind == "i2v-a14b" else None
    given = {"image": frames, "last_image": last}
    request = resolve(body, {name: [one[None]] for name, one in given.items() if one is not None}, pipe)
    assert (request.last_image is None) == (last is None)
    assert (request.height, request.width, request.guidance_scale_2) == (32, 64, more.get("guidance_scale_2"))
    picture_of = Previewer(pipe.stages, pipe.geometry.pixels_per_latent)
    assert picture_of(np.zeros(pipe.geometry.shape(1, 32, 64), np.float32)).shape == (128, 256, 3)


def test_folders_that_lack_a_part_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders("t2v-a14b"), tmp_path / "model")
    index = folder / "model_index.json"
    fields = json.loads(index.read_text())
    index.write_text(json.dumps({**fields, "boundary_ratio": None}))
    with pytest.raises(CheckpointError, match=r"model_index\.json: it has a second transformer, and no boundary_ratio"):
        VideoPipeline(folder)
    index.write_text(json.dumps({**fields, "boundary_ratio": 875}))
    with pytest.raises(CheckpointError, match=r"boundary_ratio: expected a number of 0 to 1, got 875"):
        VideoPipeline(folder)
    index.write_text(json.dumps(fields))
    shutil.rmtree(folder / "transformer_2")
    with pytest.raises(CheckpointError, match=r"no low-noise transformer: expected transformer_2/config\.json"):
        VideoPipeline(folder)


def test_transformers_of_two_sizes_are_refused(folders, tmp_path):
    folder = shutil.copytree(folders("t2v-a14b"), tmp_path / "model")
    config = folder / "transformer_2/config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(UnsupportedModelError, match="the two transformers should be of one size"):
        VideoPipeline(folder)


BASE = {"_class_name": "WanModel", "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "freq_dim": 256}


@pytest.mark.parametrize(("kind", "boundary", "shift"), [("t2v", 0.875, 12.0), ("i2v", 0.9, 5.0), ("ti2v", None, 5.0)])
def test_published_originals_have_the_settings_of_their_own_commands(kind, boundary, shift, tmp_path):
    channels = {"t2v": 16, "i2v": 36, "ti2v": 48}[kind]
    config = {**BASE, "model_type": kind, "in_dim": channels, "out_dim": 48 if kind == "ti2v" else 16}
    for name in ("",) if kind == "ti2v" else ("high_noise_model", "low_noise_model"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name in ("Wan2.2_VAE.pth" if kind == "ti2v" else "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"):
        (tmp_path / name).touch()
    opened = VideoFolder(tmp_path)
    settings = read_settings(opened, opened.flow_shift, kind=None, negative_prompts={})
    assert (settings.kind, settings.boundary_ratio, settings.shift) == (kind, boundary, shift)
    assert (settings.height, settings.num_frames) == ((704, 121) if kind == "ti2v" else (720, 81))
    assert "image_encoder" not in opened
    facts = describe_folder(tmp_path)
    assert (facts["layout"], facts["kind"]) == ("original", kind)
    pixels = "16 x 16" if kind == "ti2v" else "8 x 8"
    assert facts["latents"] == f"{48 if kind == 'ti2v' else 16} channels for 4 frames of {pixels} pixels"
    assert facts["parameters"]["text encoder"] == 5_680_910_336
    transformers = [name for name in facts["parameters"] if "transformer" in name]
    assert len(transformers) == (1 if kind == "ti2v" else 2)
