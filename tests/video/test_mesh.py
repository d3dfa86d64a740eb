"""Clips on several devices: those of one device, by the collectives that are meant. A process of its own, for its
eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verax import VideoPipeline
from verax.errors import InvalidParameterError

SCRIPT = """
import json
import re
import sys
from collections import Counter
from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook("verax.models.wan", "beartype.beartype")

import jax
import numpy as np
from flax import nnx

from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest
from verax.errors import InvalidParameterError
from verax.models.wan.vae import WanVae
from verax.models.wan.vae_config import WanVaeConfig
from verax.video.memory import plan_memory
from verax.video.mesh import REPLICATED, video_mesh
from verax.video.run import stages_of

assert jax.device_count() == 8
home = Path(sys.argv[1])
picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
size = dict(height=32, width=64, num_frames=5, num_inference_steps=2, output_type="latent")
forcing = dict(num_frames=9, base_num_frames=5, overlap_history=1, causal_attention=True)
cached = dict(num_inference_steps=8, cache="teacache", cache_threshold=1e9)


def pipeline(kind, guidance=False, sequence=1):
    if not (home / kind).exists():
        video_folder(kind, home / kind, heads=4, num_frames=5, height=32, width=64)
    return VideoPipeline(home / kind, dtype="float32", show_progress=False, guidance_parallel=guidance,
                         sequence_parallel=sequence)


def collectives(program):
    compiled = next(iter(program._compiled.values()))
    return Counter(re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)\\(",
                              compiled.as_text()))


def work(*mesh):
    pipe = pipeline("t2v", *mesh)
    request = VideoRequest("a red circle", height=256, width=256, num_frames=17, base_num_frames=17,
                           guidance="batch")
    stages = stages_of(pipe.resolve(request), pipe.parts)
    return plan_memory([stage for stage in stages if stage.name == "denoise"])[0].work


def compare(kind, meshes, **options):
    options = {**size, **options}
    one = pipeline(kind)
    expected = one("a red circle", **options)
    for mesh in meshes:
        many = pipeline(kind, *mesh)
        made = many("a red circle", **options)
        assert (made.steps, made.computed) == (expected.steps, expected.computed)
        yield {
            "difference": float(np.abs(made.frames - expected.frames).max()),
            "spread": float(expected.frames.std()),
            "steps": [made.steps, made.computed],
            "collectives": collectives(many.denoiser.program),
            "context": collectives(many.denoiser.context_program),
        }


def decoded(tile):
    sizes = dict(base_dim=4, dim_mult=(1, 2), num_res_blocks=1, temperal_downsample=(True,))
    vae = WanVae(WanVaeConfig(**sizes), rngs=nnx.Rngs(0))
    latents = np.random.default_rng(0).standard_normal((1, 3, 23, 21, 16)).astype(np.float32)
    mesh = video_mesh(guidance_parallel=True, sequence_parallel=4)
    divided = jax.shard_map(
        lambda z: vae.decode(z, chunk=1, tile=tile, axes=mesh.axis_names),
        mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False,
    )
    whole = jax.jit(lambda z: vae.decode(z, chunk=1))(latents)
    return {
        "difference": float(np.abs(jax.jit(divided)(latents) - whole).max()),
        "spread": float(whole.std()),
    }


def refusal(kind, *mesh, **options):
    try:
        pipeline(kind, *mesh)("a red circle", **{**size, **options})
    except InvalidParameterError as error:
        return str(error)


meshes = [(True, 1), (False, 2), (True, 2), (True, 4)]
print(json.dumps({
    "t2v": dict(zip(map(str, meshes), compare("t2v", meshes, output_type="np"))),
    "i2v": next(compare("i2v", [(False, 4)], image=picture, guidance="sequential")),
    "df": next(compare("df", [(True, 2)], ar_step=1, addnoise_condition=20, **forcing)),
    "cache": next(compare("t2v", [(True, 2)], **cached)),
    "experts": next(compare("t2v-a14b", [(True, 2)], num_inference_steps=5)),
    "decode": [decoded((12, 4)), decoded((23, 3))],  # 12 and 7 tiles
    "work": [work(True, 1), work(True, 4)],
    "refusals": {
        "heads": refusal("t2v", False, 8),
        "tokens": refusal("t2v", False, 4, height=48, width=80),
        "guidance": refusal("t2v", True, 2, guidance_scale=1.0),
        "devices": refusal("t2v", True, 8),
    },
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "VERAX_CACHE_DIR": str(folder / "cache"),  # the pipelines share the programs of encoders and VAE
    }
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=root, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("mesh", "collectives"),
    [
        ("(True, 1)", {"all-gather": 1}),  # of the two passes
        ("(False, 2)", {"all-to-all": 8, "all-gather": 1}),  # four of each of two layers; of the tokens
        ("(True, 2)", {"all-to-all": 8, "all-gather": 2}),
        ("(True, 4)", {"all-to-all": 8, "all-gather": 2}),
    ],
)
def test_frames_are_those_of_one_device_and_a_step_has_the_collectives_that_are_meant(found, mesh, collectives):
    case = found["t2v"][mesh]
    assert case["difference"] < 1e-4
    assert (case["collectives"], case["context"]) == (collectives, {})


@pytest.mark.parametrize(("name", "steps"), [("i2v", [2, 2]), ("df", [5, 5]), ("cache", [8, 5]), ("experts", [5, 5])])
def test_every_kind_of_model_makes_the_latents_of_one_device(found, name, steps):
    case = found[name]
    assert case["steps"] == steps
    assert case["difference"] < 1e-4 * case["spread"]


def test_tiles_of_frames_decode_on_several_devices_as_on_one(found):
    for case in found["decode"]:
        assert case["difference"] < 1e-4 * case["spread"]


def test_the_plan_has_the_memory_of_one_of_the_devices(found):
    guidance, both = found["work"]
    assert both < 0.75 * guidance


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "sequence_parallel: expected a number that divides this model's 4 heads (2, 4), got 8"),
        (
            "tokens",
            "sequence_parallel: expected a number that divides the 3 x 5 tokens of a frame of 48 x 80, got 4; "
            "height=64 or width=64 would fit",
        ),
        (
            "guidance",
            "guidance_parallel: expected a guidance_scale above 1, got 1, which needs no negative prompt: there is one "
            "pass, and nothing for the second group of devices",
        ),
        (
            "devices",
            "sequence_parallel=8, guidance_parallel=True: expected 2 x 8 = 16 devices, got 8; JAX_NUM_CPU_DEVICES=16 "
            "divides a CPU into as many",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_would_fit(found, name, message):
    assert found["refusals"][name] == message


@pytest.mark.parametrize("devices", [0, 1.0, True, "2"])
def test_a_number_of_devices_is_a_whole_one(devices):
    with pytest.raises(InvalidParameterError, match="sequence_parallel: expected a whole number of at least 1, got"):
        VideoPipeline.from_pretrained(sequence_parallel=devices)
