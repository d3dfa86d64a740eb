"""Encoders on several devices compared with one, printed as JSON: `python -m tests.support.video_encoder_mesh
FOLDER`."""

import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook(["verax.models.clip", "verax.models.umt5"], "beartype.beartype")

import jax
import numpy as np

from tests.support.devices import collectives
from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest, builtin, ops
from verax.video.memory import plan_memory
from verax.video.run import stages_of

HOME = Path(sys.argv[1])
PICTURE = np.zeros((32, 64, 3), np.uint8)
PROMPTS = "a red circle", "a blue square floats left over green gradient"


def folder(text_heads):
    path = HOME / f"t2v-{text_heads}"
    return path if path.exists() else video_folder("t2v", path, heads=4, text_heads=text_heads)


def image_folder(heads):
    """A folder whose image encoder has `heads` heads: a width of 20 divides into 2, 4 and 5."""
    path = HOME / f"i2v-{heads}"
    return path if path.exists() else video_folder("i2v", path, heads=4, image_heads=heads)


def pipeline(model, guidance=False, sequence=1, dtype="float32", **options):
    return VideoPipeline(
        model,
        dtype=dtype,
        guidance_parallel=guidance,
        sequence_parallel=sequence,
        show_progress=False,
        **options,
    )


def states(pipe):
    return np.concatenate([np.asarray(pipe.parts.prompt_states(prompt)) for prompt in PROMPTS])


def bytes_on_devices(arrays):
    """Bytes of some arrays on each device that has any of them."""
    found = Counter()
    for array in arrays:
        for part in array.addressable_shards:
            found[part.device.id] += part.data.nbytes
    return [found[device] for device in sorted(found)]


def compare(model, *mesh, dtype="float32"):
    """States of prompts on a mesh against one device, the encoder's collectives, and its weights' bytes."""
    one, many = pipeline(model, dtype=dtype), pipeline(model, *mesh, dtype=dtype)
    encoder = many.stages.text_encoder
    expected, found = states(one), states(many)
    with encoder.weights() as weights:
        held = bytes_on_devices(weights)
    plan = plan_memory(stages_of(many.resolve(VideoRequest("a")), many.parts)[:1])
    return {
        "difference": float(np.abs(found - expected).max()),
        "spread": float(expected[expected != 0].std()),  # most is padding
        "collectives": collectives(many.stages.text_program),
        "bytes": held,
        "planned": plan[0].weights,
        "arguments": many.parts.prompt_states.call.memory().arguments,
        "whole": one.stages.text_encoder.size,
    }


def compare_images(model, *mesh, dtype="float32"):
    """States of two images on a mesh against one device, with the facts of `compare`."""
    one, many = pipeline(model, dtype=dtype), pipeline(model, *mesh, dtype=dtype)
    encoder, call = many.stages.image_encoder, many.stages.image_call()
    images = np.random.default_rng(0).standard_normal((2, *call.arguments[0].shape)).astype(np.float32)
    expected, found = (np.concatenate([pipe.stages.image_call()(image) for image in images]) for pipe in (one, many))
    with encoder.weights() as weights:
        held = bytes_on_devices(weights)
    stages = stages_of(many.resolve(VideoRequest("a", image=PICTURE, num_frames=5, height=32, width=64)), many.parts)
    (plan,) = plan_memory([stage for stage in stages if stage.name == "image"])
    return {
        "difference": float(np.abs(found - expected).max()),
        "spread": float(expected.std()),
        "collectives": collectives(many.stages.image_program),
        "bytes": held,
        "planned": plan.weights,
        "whole": one.stages.image_encoder.size,
    }


def between_uses(**options):
    """Whether the encoder is on its devices after each use, and the states of two uses, none of them from the last."""
    with ops.use_target("gpu" if "offload" in options else "cpu"):
        pipe = pipeline(folder(8), True, 2, **options)
    encoder, found, loaded = pipe.stages.text_encoder, [], []
    for prompt in PROMPTS:
        found.append(np.asarray(pipe.parts.prompt_states(prompt)))
        loaded.append(encoder.loaded)
    with encoder.weights() as weights:
        held = bytes_on_devices(weights)
    expected = states(pipeline(folder(8)))
    return {"difference": float(np.abs(np.concatenate(found) - expected).max()), "loaded": loaded, "bytes": held}


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def logged(model, *mesh):
    messages, log = Messages(), logging.getLogger("verax.video")
    log.addHandler(messages)
    pipeline(model, *mesh)
    log.removeHandler(messages)
    return messages.texts


MESHES = [(True, 1), (False, 2), (True, 2), (False, 4), (True, 4)]
IMAGE_MESHES = [(True, 1), (False, 2), (True, 2), (False, 4)]

if __name__ == "__main__":
    assert jax.device_count() == 8
    os.environ["VERAX_CACHE_DIR"] = str(HOME / "cache")
    print(
        json.dumps(
            {
                "float32": {str(mesh): compare(folder(8), *mesh) for mesh in MESHES},
                "bfloat16": {str(mesh): compare(folder(8), *mesh, dtype="bfloat16") for mesh in MESHES[-1:]},
                "images": {str(mesh): compare_images(image_folder(4), *mesh) for mesh in IMAGE_MESHES},
                "bfloat16 images": compare_images(image_folder(4), True, 2, dtype="bfloat16"),
                "five heads": compare_images(image_folder(5), True, 2),
                "some": compare(folder(4), True, 4),
                "none": compare(folder(3), True, 2),
                "built-in": compare(builtin.video_model(), True, 2),
                "messages": {heads: logged(folder(heads), True, 4) for heads in (8, 4, 3)},
                "image messages": logged(image_folder(4), True, 4),
                "kept": between_uses(keep_encoders=True),
                "dropped": between_uses(keep_encoders=False),
                "offloaded": between_uses(offload=True),
            }
        )
    )
