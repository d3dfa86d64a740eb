"""The plan of a video model, against the pipeline's own parts."""

import json

import pytest

from tests.support.tiny_video import SIZES, video_folder
from verax.errors import InvalidParameterError
from verax.plan.devices import find_device
from verax.plan.run import plan
from verax.video.pipeline import VideoPipeline

DEVICE = find_device("h100")
CLIP = dict(frames=9, height=32, width=48)


@pytest.mark.parametrize("kind", ["i2v", "t2v-a14b"])
def test_weights_are_those_of_the_pipelines_models(tmp_path, kind):
    folder = video_folder(kind, tmp_path / kind)
    found = plan(str(folder), DEVICE, **CLIP)
    components = VideoPipeline.from_pretrained(folder).parts.components
    assert {row["part"]: row["nbytes"] for row in found["weights"]} == {one.name: one.size for one in components}
    names = [program["name"] for program in found["programs"]]
    assert ("image encoder" in names) == (kind == "i2v")


def test_a_step_multiplies_what_a_formula_by_hand_says(tmp_path):
    found = plan(str(video_folder("t2v", tmp_path / "t2v", text_tokens=24)), DEVICE, **CLIP, inference_steps=7)
    step = next(program for program in found["programs"] if program["name"].startswith("denoising step"))
    D, F, E = SIZES["num_attention_heads"] * SIZES["attention_head_dim"], SIZES["ffn_dim"], SIZES["freq_dim"]
    T, S = 3 * 2 * 3, 24  # tokens of 3 x 2 x 3 patches, words
    layer = 2 * T * (4 * D * D + 2 * D * F + 2 * D * D) + 4 * T * T * D + 4 * T * S * D
    time = 2 * (E * D + D * D + D * 6 * D)
    patches = 2 * T * (16 * 4 * D + D * 16 * 4)
    assert step["times"] == 7
    assert step["flops"] == 2 * (SIZES["num_layers"] * layer + time + patches)
    clip = sum(program["times"] * program["at_least_s"] for program in found["programs"])
    assert found["at_least"] == {"seconds a step": step["at_least_s"], "seconds a clip": clip}


def test_the_transformers_configuration_is_enough(tmp_path):
    config = {"_class_name": "WanModel", "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(str(tmp_path), DEVICE, **CLIP)
    assert {row["part"] for row in found["weights"]} == {"text encoder", "transformer", "video VAE"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 8}, "frames: expected a multiple of 4 and one more, got 8"),
        ({"height": 40}, "height: expected a multiple of 16 pixels, got 40"),
        ({"context": 5}, "context: the plan of a model of kind video has no such option"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        plan("t2v-1.3b", DEVICE, **options)
