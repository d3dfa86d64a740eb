"""The plan of a video model, against the pipeline's own parts."""

import json

import pytest

from tests.support.tiny_video import SIZES, video_folder
from verax.errors import InvalidParameterError
from verax.plan import plan
from verax.plan.devices import find_device
from verax.plan.video import read_clip, step_flops
from verax.video.pipeline import VideoPipeline

DEVICE = find_device("h100")
CLIP = dict(num_frames=9, height=32, width=48)


@pytest.mark.parametrize("kind", ["i2v", "t2v-a14b", "flf2v", "vace"])
def test_weights_are_those_of_the_pipelines_models(tmp_path, kind):
    folder = video_folder(kind, tmp_path / kind)
    result = plan(str(folder), DEVICE, **CLIP)
    components = VideoPipeline.from_pretrained(folder).parts.components
    assert {row["part"]: row["nbytes"] for row in result["weights"]} == {one.name: one.size for one in components}
    assert ("image encoder" in {row["part"] for row in result["weights"]}) == (kind in ("i2v", "flf2v"))


def test_a_step_multiplies_what_a_formula_by_hand_says(tmp_path):
    folder = str(video_folder("t2v", tmp_path / "t2v", text_tokens=24))
    result = plan(folder, DEVICE, **CLIP, num_inference_steps=7)
    step, decode = result["programs"]
    D, F = SIZES["num_attention_heads"] * SIZES["attention_head_dim"], SIZES["ffn_dim"]
    T, S = 3 * 2 * 3, 24  # tokens of 3 x 2 x 3 patches, words
    layer = 2 * T * (4 * D * D + 2 * D * F + 2 * D * D) + 4 * T * T * D + 4 * T * S * D
    patches = 2 * T * (16 * 4 * D + D * 16 * 4)
    assert step["times"] == 7
    assert step["flops"] == 2 * (SIZES["num_layers"] * layer + patches)
    clip = 7 * step["at_least_s"] + decode["at_least_s"]
    assert result["at_least"] == {"seconds a step": step["at_least_s"], "seconds a clip": clip}
    halved = plan(folder, DEVICE, **CLIP, num_inference_steps=7, half_size_steps=3)
    small, whole, _ = halved["programs"]
    T = 3 * 1 * 1
    layer = 2 * T * (4 * D * D + 2 * D * F + 2 * D * D) + 4 * T * T * D + 4 * T * S * D
    assert (small["times"], whole["times"], whole["flops"]) == (3, 4, step["flops"])
    assert small["flops"] == 2 * (SIZES["num_layers"] * layer + 2 * T * (16 * 4 * D + D * 16 * 4))
    assert halved["memory"] == result["memory"]


def test_control_blocks_have_memory_and_products_of_their_own(tmp_path):
    result = plan(str(video_folder("vace", tmp_path / "vace", text_tokens=24)), DEVICE, **CLIP)
    D, F, T, S = 24, 32, 3 * 2 * 3, 24
    layer = 2 * T * (6 * D * D + 2 * D * F) + 4 * T * (T + S) * D
    # Three blocks and two control blocks, with three projections.
    assert result["programs"][0]["flops"] == 2 * (5 * layer + 2 * T * ((16 + 16 + 96) * 4 * D + 3 * D * D))
    (work,) = (row["work"] for row in result["stages"] if row["stage"] == "denoise")
    keys, latents = 2 * 2 * 5 * S * D * 2, 4 * 3 * 4 * 6 * (4 * 16 + 96)
    streams, operands = 3 * 4 * T * D, T * 3 * D * 2
    assert work == keys + latents + streams + operands
    assert "encode" in {row["stage"] for row in result["stages"]}


def test_products_of_8_bit_integers_have_their_own_rate(tmp_path):
    folder = video_folder("i2v", tmp_path / "i2v")
    clip = read_clip(folder, **CLIP)
    plain, rounded = (plan(str(folder), DEVICE, quantization=q, **CLIP)["programs"] for q in (None, "int8"))
    weights, _ = step_flops(clip.transformer, clip.tokens, clip.words)
    saved = plain[0]["parts_s"]["compute"] - rounded[0]["parts_s"]["compute"]
    assert saved == pytest.approx(2 * weights * (1 / DEVICE.rate("bfloat16") - 1 / DEVICE.rate("int8")))
    assert rounded[1] == plain[1]


def test_devices_hold_parts_of_what_they_divide(tmp_path):
    folder = str(video_folder("i2v", tmp_path / "i2v", heads=4))
    clip = dict(num_frames=9, height=32, width=64, devices=8)
    whole, divided = plan(folder, DEVICE, **clip), plan(folder, DEVICE, **clip, shard_weights=True)
    assert whole["settings"] | {"guidance_parallel": True, "sequence_parallel": 4} == whole["settings"]
    parts = {row["part"]: row for row in divided["weights"]}
    assert parts["video VAE"]["per_device"] == parts["video VAE"]["nbytes"]
    assert parts["text encoder"]["per_device"] < parts["text encoder"]["nbytes"] / 2
    D, F = 4 * SIZES["attention_head_dim"], SIZES["ffn_dim"]
    block = 2 * (10 * D * D + 2 * D * F)  # bytes of its matrices: eight of attention, two for the image, two more
    assert parts["transformer"]["nbytes"] - parts["transformer"]["per_device"] == SIZES["num_layers"] * block * 7 // 8
    assert divided["memory"]["weights"] == parts["transformer"]["per_device"]
    assert whole["memory"]["weights"] == parts["transformer"]["nbytes"]
    assert divided["memory"]["largest gathered matrix"] == 2 * D * D


@pytest.mark.parametrize(
    ("model", "clip"),
    [
        ("df-1.3b", (97, 544, 960, 30)),
        ("i2v-1.3b", (97, 544, 960, 30)),
        ("t2v-1.3b", (81, 480, 832, 50)),
        ("i2v-14b", (81, 720, 1280, 40)),
        ("vace-14b", (81, 720, 1280, 50)),
        ("t2v-a14b", (81, 720, 1280, 40)),
        ("ti2v-5b", (121, 704, 1280, 50)),
    ],
)
def test_shapes_by_name_have_the_clip_of_their_authors(model, clip):
    request = read_clip(model).request
    assert (request.num_frames, request.height, request.width, request.num_inference_steps) == clip


def test_the_transformers_configuration_is_enough(tmp_path):
    config = {"_class_name": "WanModel", "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = plan(str(tmp_path), DEVICE, **CLIP)
    assert {row["part"] for row in result["weights"]} == {"text encoder", "transformer", "video VAE"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 8}, r"num_frames: expected 4n \+ 1, got 8; nearest 5 or 9"),
        ({"height": 40}, "height: expected a multiple of 16, got 40; nearest 32 or 48"),
        ({"sequence_parallel": 5}, r"sequence_parallel: expected a number that divides this model's 12 heads \(2, 3"),
        (
            {"sequence_parallel": 4, "height": 48, "width": 80},
            "sequence_parallel: expected a number that divides the 3 x 5 tokens of a frame of 48 x 80, got 4; "
            "height=64 or width=64 would fit",
        ),
        ({"num_inference_steps": 5, "half_size_steps": 5}, "half_size_steps: expected fewer than the 5 steps"),
        ({"devices": 3, "sequence_parallel": 2}, "devices: expected 2, of guidance_parallel=False and"),
        ({"shard_weights": True}, "shard_weights: expected several devices to divide the weights over, got one"),
        ({"model": "vace-1.3b", "devices": 2, "shard_weights": True}, "shard_weights: not implemented for VACE"),
        ({"max_model_len": 5}, "max_model_len: the plan of a model of kind video has no such option"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        plan(**{"model": "t2v-1.3b", "device": DEVICE, **options})
