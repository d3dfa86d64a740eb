"""Clips and encoders on several devices compared with one, as JSON: `python -m tests.support.video_mesh FOLDER`."""

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook(["verax.models.wan", "verax.models.clip", "verax.models.umt5"], "beartype.beartype")

import jax
import numpy as np
from flax import nnx

from tests.support.devices import collectives
from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest, ops
from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.plan import plan
from verax.plan.devices import find_device
from verax.video.memory import plan_memory
from verax.video.mesh import GUIDANCE, REPLICATED, SEQUENCE
from verax.video.run import stages_of

HOME = Path(sys.argv[1])
PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
PROMPTS = "a red circle", "a blue square floats left over green gradient"
SIZE = dict(height=32, width=64, num_frames=5, num_inference_steps=2, output_type="latent")
SHARDED = True
FORCING = dict(num_frames=9, base_num_frames=5, overlap_history=1, causal_attention=True)
CACHED = dict(num_inference_steps=8, cache="teacache", cache_threshold=1e9)


def folder(kind, heads=4, text_heads=4, image_heads=2):
    """A checkpoint with numbers of heads; a width of 20 of the image encoder divides into 2, 4 and 5."""
    path = HOME / f"{kind}-{heads}-{text_heads}-{image_heads}"
    sizes = dict(heads=heads, text_heads=text_heads, image_heads=image_heads, num_frames=5, height=32, width=64)
    return path if path.exists() else video_folder(kind, path, **sizes)


def pipeline(model, guidance=False, sequence=1, shard_weights=False, **options):
    divided = dict(guidance_parallel=guidance, sequence_parallel=sequence, shard_weights=shard_weights)
    return VideoPipeline(model, dtype="float32", show_progress=False, **divided, **options)


def difference(found, expected):
    return {"difference": float(np.abs(found - expected).max()), "spread": float(expected[expected != 0].std())}


def compare(kind, meshes, **options):
    """Clips on meshes against one device, their steps, and the collectives of two programs."""
    options = {**SIZE, **options}
    expected = pipeline(folder(kind))("a red circle", **options)
    for mesh in meshes:
        many = pipeline(folder(kind), *mesh)
        clip = many("a red circle", **options)
        assert (clip.steps, clip.computed) == (expected.steps, expected.computed)
        yield difference(clip.frames, expected.frames) | {
            "steps": [clip.steps, clip.computed],
            "collectives": collectives(many.denoiser.program),
            "context": collectives(many.denoiser.context_program),
        }


def decoded(tile):
    """Frames of a VAE in tiles over all devices against the whole."""
    sizes = dict(base_dim=4, dim_mult=(1, 2), num_res_blocks=1, temperal_downsample=(True,))
    vae = WanVae(WanVaeConfig(**sizes), rngs=nnx.Rngs(0))
    latents = np.random.default_rng(0).standard_normal((1, 3, 23, 21, 16)).astype(np.float32)
    mesh = make_mesh((2, 4), (GUIDANCE, SEQUENCE))
    whole = dict(in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    divided = jax.shard_map(lambda z: vae.decode(z, chunk=1, tile=tile, axes=mesh.axis_names), mesh=mesh, **whole)
    expected = np.asarray(jax.jit(lambda z: vae.decode(z, chunk=1))(latents))
    return difference(np.asarray(jax.jit(divided)(latents)), expected)


def work(*mesh):
    """Bytes of the arrays in between of a denoising step."""
    pipe = pipeline(folder("t2v"), *mesh)
    request = VideoRequest("a red circle", height=256, width=256, num_frames=17, base_num_frames=17, guidance="batch")
    stages = stages_of(pipe.resolve(request), pipe.parts)
    return plan_memory([stage for stage in stages if stage.name == "denoise"])[0].work


def plan_of_wide_model(shard_weights):
    """Bytes of weights and work on one of eight devices, of a model whose weights are the most of both."""
    stages = pipeline(folder("t2v", 32), True, 4, shard_weights).plan(VideoRequest("a red circle", **SIZE))
    return next([stage.weights, stage.work] for stage in stages if stage.stage == "denoise")


def planned(kind, *mesh):
    """Bytes of weights on one of the devices by stage, as the pipeline and as `verax plan` have them."""
    request = VideoRequest("a red circle", image=PICTURE if kind == "i2v" else None, num_frames=5)
    names = dict(zip(("guidance_parallel", "sequence_parallel", "shard_weights"), mesh, strict=False))
    instant = plan(str(folder(kind)), find_device("h100"), dtype="float32", num_frames=5, **names)["stages"]
    compiled = pipeline(folder(kind), *mesh).plan(request)
    return {
        "compiled": [(stage.stage, stage.weights, stage.others, stage.work) for stage in compiled],
        "instant": [(row["stage"], row["weights"], row["others"], row["work"]) for row in instant],
    }


def refusal(*mesh, **options):
    try:
        pipeline(folder("t2v"), *mesh)("a red circle", **{**SIZE, **options})
    except InvalidParameterError as error:
        return str(error)


def given():
    """Latents of a pipeline on a mesh of the last four devices, against its options on one; where its weights are."""
    mesh = jax.make_mesh((2, 2), ("guidance", "sequence"), devices=jax.devices()[4:])
    many = VideoPipeline(folder("t2v"), dtype="float32", show_progress=False, mesh=mesh)
    expected = pipeline(folder("t2v"), True, 2)("a red circle", **SIZE)
    clip = many("a red circle", **SIZE)
    with contextlib.ExitStack() as held:
        weights = [held.enter_context(one.weights()) for one in many.parts.components]
    return {
        "equal": bool((clip.frames == expected.frames).all()),
        "devices": [sorted({device.id for array in arrays for device in array.devices()}) for arrays in weights],
    }


def chosen(devices, **options):
    """Sizes of the mesh that a number of devices becomes."""
    wanted = VideoRequest("a red circle", **options)
    pipe = VideoPipeline(folder("t2v"), dtype="float32", show_progress=False, devices=devices, devices_for=wanted)
    pipe.resolve(wanted)
    return [1, 1] if pipe.mesh is None else list(pipe.mesh.shape.values())


def states(pipe):
    return np.concatenate([np.asarray(pipe.parts.prompt_states(prompt)) for prompt in PROMPTS])


def image_states(pipe):
    call = pipe.stages.image_call()
    images = np.random.default_rng(0).standard_normal((2, *call.arguments[0].shape)).astype(np.float32)
    return np.concatenate([np.asarray(call(image)) for image in images])


ENCODERS = {"text": states, "image": image_states}


def bytes_on_devices(component):
    """Bytes of a component's weights on each device that has any of them."""
    held = Counter()
    with component.weights() as weights:
        for array in weights:
            for part in array.addressable_shards:
                held[part.device.id] += part.data.nbytes
    return [held[device] for device in sorted(held)]


@cache
def one_device(model, part):
    """States of prompts or images on one device, and the bytes of the encoder."""
    pipe = pipeline(model)
    return ENCODERS[part](pipe), getattr(pipe.stages, f"{part}_encoder").size


def compare_encoders(model, *mesh, part="text"):
    """States of prompts or images on a mesh against one device, the encoder's collectives, and its weights' bytes.

    `messages` are logged when the pipeline is opened.
    """
    messages, log, handler = [], logging.getLogger("verax.video"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log.addHandler(handler)
    many = pipeline(model, *mesh)
    log.removeHandler(handler)
    expected, whole = one_device(model, part)
    compared = difference(ENCODERS[part](many), expected)
    request = VideoRequest("a", image=PICTURE if part == "image" else None, num_frames=5, height=32, width=64)
    (row,) = plan_memory([stage for stage in stages_of(many.resolve(request), many.parts) if stage.name == part])
    return compared | {
        "collectives": collectives(getattr(many.stages, f"{part}_program")),
        "bytes": bytes_on_devices(getattr(many.stages, f"{part}_encoder")),
        "planned": row.weights,
        "arguments": many.parts.prompt_states.call.memory().arguments,
        "whole": whole,
        "messages": messages,
    }


def between_uses(**options):
    """Whether the encoder is on its devices after each use, and the states of two uses, none of them from the last."""
    with ops.use_target("gpu" if "offload" in options else "cpu"):
        pipe = pipeline(folder("t2v", text_heads=8), False, 4, **options)
    encoder, found, loaded = pipe.stages.text_encoder, [], []
    for prompt in PROMPTS:
        found.append(np.asarray(pipe.parts.prompt_states(prompt)))
        loaded.append(encoder.loaded)
    compared = difference(np.concatenate(found), one_device(folder("t2v", text_heads=8), "text")[0])
    return compared | {"loaded": loaded, "bytes": bytes_on_devices(encoder)}


MESHES = [(True, 1), (True, 4), (True, 4, SHARDED)]
ENCODER_MESHES = [(False, 4), (True, 4)]


def clips():
    return {
        "t2v": dict(zip(map(str, MESHES), compare("t2v", MESHES, output_type="np"), strict=True)),
        "i2v": next(compare("i2v", [(False, 4, SHARDED)], image=PICTURE, guidance="sequential")),
        "df": next(compare("df", [(True, 2)], ar_step=1, addnoise_condition=20, **FORCING)),
        "cache": next(compare("t2v", [(True, 2)], **CACHED)),
        "experts": next(compare("t2v-a14b", [(True, 2, SHARDED)], num_inference_steps=5)),
        "vace": next(
            compare("vace", [(True, 2)], video=PICTURE[None].repeat(5, 0), reference_images=PICTURE, half_size_steps=1)
        ),
        "decode": [decoded((12, 4)), decoded((23, 3))],  # 12 and 7 tiles
        "work": [work(True, 1), work(True, 4)],
        "plans": [plan_of_wide_model(False), plan_of_wide_model(SHARDED)],
        "planned": [planned("i2v", *MESHES[-1]), planned("t2v-a14b", True, 2)],
        "given": given(),
        "chosen": {
            "8": chosen(8),
            "6": chosen(6),
            "1": chosen(1),
            "no guidance": chosen(8, guidance_scale=1.0),
            "15 tokens": chosen(8, height=48, width=80),
        },
        "refusals": {
            "heads": refusal(False, 8),
            "tokens": refusal(False, 4, height=48, width=80),
            "half size": refusal(False, 4, height=32, width=32, half_size_steps=1),
            "guidance": refusal(True, 2, guidance_scale=1.0),
            "devices": refusal(True, 8),
        },
    }


def encoders():
    text = {heads: folder("t2v", text_heads=heads) for heads in (8, 4, 3)}
    image = {heads: folder("i2v", image_heads=heads) for heads in (4, 5)}
    return {
        "text": {str(mesh): compare_encoders(text[8], *mesh) for mesh in ENCODER_MESHES},
        "image": compare_encoders(image[4], True, 4, part="image"),
        "five heads": compare_encoders(image[5], True, 2, part="image"),
        "some": compare_encoders(text[4], True, 4),
        "none": compare_encoders(text[3], True, 4),
        "dropped": between_uses(keep_encoders=False),
        "offloaded": between_uses(offload=True),
    }


if __name__ == "__main__":
    assert jax.device_count() == 8
    os.environ["VERAX_CACHE_DIR"] = str(HOME / "cache")  # the pipelines share the programs of encoders and VAE
    print(json.dumps({"clips": clips(), "encoders": encoders()}))
