"""Process of one side of `verax bench video --stage clip`, run by a Python that need not have verax.

Its argument is a JSON file: `engine`, a key of `ENGINES`; `load`, the arguments of its function; `clip`,
the options of a clip; `runs`, the number of clips; `folder`, for the frames as images and as `frames.npy`. It writes
JSON to standard output: the package's `version`, `start_s` until the package is imported and the model is open, the
`seconds` of each clip from its prompt to its files, `stages` and `buffers` of the last clip (seconds, and bytes without
the weights, by stage) and the process's peak memory in bytes, `peak_bytes`.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Clip = tuple[np.ndarray, dict[str, float], dict[str, int]]
"""Frames uint8 `[T, H, W, 3]`, and the seconds and the bytes of buffers of the stages, as far as they are known."""

Make = Callable[[dict[str, Any], Path], Clip]
"""Function from the options of a clip to the clip. It writes the frames into a folder, as images."""


def verax(package: Any, **load: Any) -> Make:
    """`VideoPipeline` of verax."""
    pipe = package.VideoPipeline(load.pop("folder"), show_progress=False, **load)

    def make(clip: dict[str, Any], folder: Path) -> Clip:
        out = pipe(**clip)
        out.save(folder / "images")
        rows = pipe.plan(package.VideoRequest(**clip))
        return out.frames, out.seconds, {row.stage: row.work for row in rows}

    return make


def diffusers(package: Any, folder: str, dtype: str) -> Make:
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

    def make(clip: dict[str, Any], folder: Path) -> Clip:
        stages.clear()
        out = pipe(**{**clip, "latents": torch.from_numpy(clip["latents"])}, output_type="np").frames[0]
        frames = (out * 255).round().astype(np.uint8)
        _save_images(frames, folder)
        return frames, dict(stages), {}

    return make


def stable_diffusion_cpp(package: Any, **load: Any) -> Make:
    """stable-diffusion.cpp; its log on standard error has the seconds and the buffers of its stages."""
    model = package.StableDiffusion(**load)

    def make(clip: dict[str, Any], folder: Path) -> Clip:
        frames = np.stack([np.asarray(image.convert("RGB")) for image in model.generate_video(**clip)])
        _save_images(frames, folder)
        return frames, {}, {}

    return make


def _save_images(frames: np.ndarray, folder: Path) -> None:
    image = importlib.import_module("PIL.Image")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for i, frame in enumerate(frames):
        image.fromarray(frame).save(folder / "images" / f"{i:05d}.png")


ENGINES: dict[str, Callable[..., Make]] = {
    "verax": verax,
    "diffusers": diffusers,
    "stable_diffusion_cpp": stable_diffusion_cpp,
}
"""Function by module: from the module and the arguments of its model to a function that makes clips."""


def main() -> None:
    """Make the clips of the request in the file that the argument names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for the answer
    request, begin = json.loads(Path(sys.argv[1]).read_text()), time.perf_counter()
    folder, clip, seconds = Path(request["folder"]), request["clip"], []
    frames, stages, buffers = np.empty(0), {}, {}
    answer: dict[str, Any]
    try:
        package = importlib.import_module(request["engine"])
        make = ENGINES[request["engine"]](package, **request["load"])
        answer = {"version": package.__version__, "start_s": time.perf_counter() - begin}
        if "latents" in clip:
            clip["latents"] = np.load(clip["latents"])
        for i in range(request["runs"]):
            options = clip | {"prompt": f"{clip['prompt']} {i + 1}."}  # another one, since states of prompts are kept
            begin = time.perf_counter()
            frames, stages, buffers = make(options, folder)
            seconds.append(time.perf_counter() - begin)
        np.save(folder / "frames.npy", frames)
        # Not getrusage's: it counts what the process that started this one had held.
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        peak = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        answer |= {"seconds": seconds, "stages": stages, "buffers": buffers, "peak_bytes": peak}
    except ModuleNotFoundError as error:
        answer = {"missing": error.name}
    except Exception as error:  # the reader of the answer raises it
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
