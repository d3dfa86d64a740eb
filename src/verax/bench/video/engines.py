"""Engines of `verax bench video --stage clip` in processes of their own, see `bench.worker`.

Each function has the name of the package that it takes, before the arguments of its model, and returns a function that
makes a clip of the options of one, and the versions. A `folder` gets the frames: as images, and as `frames.npy`, uint8
`[T, H, W, 3]`.
"""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Stages = dict[str, Any]
"""`seconds` of the stages, bytes of their `buffers` without the weights, and steps `computed`, as far as known."""

Engine = tuple[Callable[..., Stages], dict[str, str]]
"""Function that makes a clip, and the versions of the packages."""


def verax(package: Any, folder: str, **load: Any) -> Engine:
    """`VideoPipeline` of verax."""
    pipe = package.VideoPipeline(folder, show_progress=False, **load)

    def make(folder: str, latents: str, **clip: Any) -> Stages:
        clip["latents"] = np.load(latents)
        out = pipe(**clip)
        out.save(Path(folder, "images"))
        np.save(Path(folder, "frames.npy"), out.frames)
        rows = pipe.plan(package.VideoRequest(**clip))
        steps = {"computed": f"{out.computed} of {out.steps}"} if clip.get("cache") else {}
        return {"seconds": out.seconds, "buffers": {row.stage: row.work for row in rows}, **steps}

    return make, {}


def diffusers(package: Any, folder: str, dtype: str) -> Engine:
    """Pipeline of diffusers on the processor, with all parts in one dtype."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    # Not as model_index.json says: transformers makes a T5Tokenizer of its own kind of tokenizer.json only.
    tokenizer = importlib.import_module("transformers").PreTrainedTokenizerFast.from_pretrained(f"{folder}/tokenizer")
    pipe = package.DiffusionPipeline.from_pretrained(folder, tokenizer=tokenizer, dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    stages: dict[str, float] = {}

    def measure(name: str, owner: Any, method: str) -> None:
        function = getattr(owner, method)

        def measured(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **options)
            stages[name] = stages.get(name, 0.0) + time.perf_counter() - begin
            return result

        setattr(owner, method, measured)

    measure("text", pipe, "encode_prompt")
    measure("denoise", pipe.transformer, "forward")
    measure("decode", pipe.vae, "decode")

    def make(folder: str, latents: str, **clip: Any) -> Stages:
        stages.clear()
        out = pipe(**clip, latents=torch.from_numpy(np.load(latents)), output_type="np").frames[0]
        _save((out * 255).round().astype(np.uint8), Path(folder))
        return {"seconds": stages, "buffers": {}}

    return make, {"diffusers": package.__version__, "torch": torch.__version__}


def stable_diffusion_cpp(package: Any, **load: Any) -> Engine:
    """stable-diffusion.cpp; its log on standard error has the seconds and the buffers of its stages."""
    model = package.StableDiffusion(**load)

    def make(folder: str, **clip: Any) -> Stages:
        _save(np.stack([np.asarray(image.convert("RGB")) for image in model.generate_video(**clip)]), Path(folder))
        return {"seconds": {}, "buffers": {}}

    return make, {"stable-diffusion.cpp": package.__version__}


def _save(frames: np.ndarray, folder: Path) -> None:
    image = importlib.import_module("PIL.Image")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for i, frame in enumerate(frames):
        image.fromarray(frame).save(folder / "images" / f"{i:05d}.png")
    np.save(folder / "frames.npy", frames)
