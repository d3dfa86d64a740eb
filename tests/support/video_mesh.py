"""Clips on several devices compared with one, printed as JSON: `python -m tests.support.video_mesh FOLDER`."""

import contextlib
import json
import os
import sys
from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook("verax.models.wan", "beartype.beartype")

import jax
import numpy as np
from flax import nnx

from tests.support.devices import collectives
from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest
from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.plan.devices import find_device
from verax.plan.run import plan
from verax.video.memory import plan_memory
from verax.video.mesh import GUIDANCE, REPLICATED, SEQUENCE
from verax.video.run import stages_of

HOME = Path(sys.argv[1])
PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
SIZE = dict(height=32, width=64, num_frames=5, num_inference_steps=2, output_type="latent")
SHARDED = True
FORCING = dict(num_frames=9, base_num_frames=5, overlap_history=1, causal_attention=True)
CACHED = dict(num_inference_steps=8, cache="teacache", cache_threshold=1e9)


def pipeline(kind, guidance=False, sequence=1, shard_weights=False, heads=4):
    folder = HOME / f"{kind}-{heads}"
    if not folder.exists():
        video_folder(kind, folder, heads=heads, num_frames=5, height=32, width=64)
    return VideoPipeline(
        folder,
        dtype="float32",
        show_progress=False,
        guidance_parallel=guidance,
        sequence_parallel=sequence,
        shard_weights=shard_weights,
    )


def work(*mesh):
    pipe = pipeline("t2v", *mesh)
    request = VideoRequest("a red circle", height=256, width=256, num_frames=17, base_num_frames=17, guidance="batch")
    stages = stages_of(pipe.resolve(request), pipe.parts)
    return plan_memory([stage for stage in stages if stage.name == "denoise"])[0].work


def plan_of_wide_model(shard_weights):
    """Bytes of weights and work on one of eight devices, of a model whose weights are the most of both."""
    pipe = pipeline("t2v", True, 4, shard_weights, heads=32)
    stages = pipe.plan(VideoRequest("a red circle", **SIZE))
    return next([stage.weights, stage.work] for stage in stages if stage.stage == "denoise")


def planned(kind, *mesh):
    """Bytes of weights on one of the devices by stage, as the pipeline and as `verax plan` have them."""
    pipe = pipeline(kind, *mesh)
    request = VideoRequest("a red circle", image=PICTURE if kind == "i2v" else None, num_frames=5)
    names = dict(zip(("guidance_parallel", "sequence_parallel", "shard_weights"), mesh, strict=False))
    found = plan(str(HOME / f"{kind}-4"), find_device("h100"), dtype="float32", num_frames=5, **names)
    stages = [(row["stage"], row["weights"], row["others"], row["work"]) for row in found["stages"]]
    compiled = [(stage.stage, stage.weights, stage.others, stage.work) for stage in pipe.plan(request)]
    return {"compiled": compiled, "instant": stages}


def compare(kind, meshes, **options):
    options = {**SIZE, **options}
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
    mesh = make_mesh((2, 4), (GUIDANCE, SEQUENCE))
    divided = jax.shard_map(
        lambda z: vae.decode(z, chunk=1, tile=tile, axes=mesh.axis_names),
        mesh=mesh,
        in_specs=REPLICATED,
        out_specs=REPLICATED,
        check_vma=False,
    )
    whole = jax.jit(lambda z: vae.decode(z, chunk=1))(latents)
    return {
        "difference": float(np.abs(jax.jit(divided)(latents) - whole).max()),
        "spread": float(whole.std()),
    }


def refusal(kind, *mesh, **options):
    try:
        pipeline(kind, *mesh)("a red circle", **{**SIZE, **options})
    except InvalidParameterError as error:
        return str(error)


def given(kind):
    """Latents of a pipeline on a mesh of the last four devices, against its options on one; where its weights are."""
    mesh = jax.make_mesh((2, 2), ("guidance", "sequence"), devices=jax.devices()[4:])
    many = VideoPipeline(HOME / f"{kind}-4", dtype="float32", show_progress=False, mesh=mesh)
    expected = pipeline(kind, True, 2)("a red circle", **SIZE)
    made = many("a red circle", **SIZE)
    with contextlib.ExitStack() as held:
        weights = [held.enter_context(one.weights()) for one in many.parts.components]
    return {
        "equal": bool((made.frames == expected.frames).all()),
        "devices": [sorted({device.id for array in arrays for device in array.devices()}) for arrays in weights],
    }


def chosen(devices, **options):
    wanted = VideoRequest("a red circle", **options)
    pipe = VideoPipeline(HOME / "t2v-4", dtype="float32", show_progress=False, devices=devices, devices_for=wanted)
    pipe.resolve(wanted)
    return [1, 1] if pipe.mesh is None else list(pipe.mesh.shape.values())


MESHES = [(True, 1), (False, 2), (True, 2), (True, 4), (True, 4, SHARDED)]

if __name__ == "__main__":
    assert jax.device_count() == 8
    os.environ["VERAX_CACHE_DIR"] = str(HOME / "cache")  # the pipelines share the programs of encoders and VAE
    print(
        json.dumps(
            {
                "t2v": dict(zip(map(str, MESHES), compare("t2v", MESHES, output_type="np"), strict=True)),
                "i2v": list(compare("i2v", [(False, 4), (False, 4, SHARDED)], image=PICTURE, guidance="sequential")),
                "df": list(compare("df", [(True, 2), (True, 2, SHARDED)], ar_step=1, addnoise_condition=20, **FORCING)),
                "cache": list(compare("t2v", [(True, 2), (True, 2, SHARDED)], **CACHED)),
                "experts": list(compare("t2v-a14b", [(True, 2), (True, 2, SHARDED)], num_inference_steps=5)),
                "decode": [decoded((12, 4)), decoded((23, 3))],  # 12 and 7 tiles
                "work": [work(True, 1), work(True, 4)],
                "plans": [plan_of_wide_model(False), plan_of_wide_model(SHARDED)],
                "planned": [planned("i2v", False, 2), planned("i2v", *MESHES[-1]), planned("t2v-a14b", True, 2)],
                "given": given("t2v"),
                "chosen": {
                    "8": chosen(8),
                    "6": chosen(6),
                    "1": chosen(1),
                    "no guidance": chosen(8, guidance_scale=1.0),
                    "15 tokens": chosen(8, height=48, width=80),
                },
                "refusals": {
                    "heads": refusal("t2v", False, 8),
                    "tokens": refusal("t2v", False, 4, height=48, width=80),
                    "guidance": refusal("t2v", True, 2, guidance_scale=1.0),
                    "devices": refusal("t2v", True, 8),
                },
            }
        )
    )
