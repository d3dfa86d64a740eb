"""Whole clips, from the prompt to the files, each side in a process of its own: `verax bench video --stage clip`.

Without a checkpoint, the model is text to video with random weights in the original layout, which stable-diffusion.cpp
reads too. Its UMT5 is a GGUF file, since all of it in bfloat16 would be 11 GB. diffusers needs a folder of its own
layout, with UMT5 in floats, which verax then reads too, so that both do the same work.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import builtin
from verax.bench.harness import Benchmark, Samples, case_result
from verax.bench.processes import WorkerProcess
from verax.bench.results import sides_table, slug
from verax.bench.settings import VideoSettings, check_names
from verax.bench.video import engines
from verax.checkpoint.formats.safetensors import NewTensor, write_shards
from verax.checkpoint.load import random_weight
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import TOKENIZER, VideoFolder
from verax.checkpoint.video.parts import PARTS, UMT5
from verax.compare.cases.video import PART_SIDES
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError
from verax.files import write_json
from verax.machine import num_cores
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.ops.cpu import library

PROMPT = "A cat on a surfboard looks back over its shoulder while a wave breaks behind it."

VARIANTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": ({"quantization": "int8"}, {}),
    "teacache": ({}, {"cache": "teacache"}),
    "magcache": ({}, {"cache": "magcache"}),
    "lightx2v": ({}, {"recipe": "lightx2v"}),
}
"""Options of `VideoPipeline`, and of a clip, by the name of what makes clips cheaper."""

REMEDY = (
    "python3.11 -m venv sdcpp; sdcpp/bin/pip install stable-diffusion-cpp-python; then --peer-python sdcpp/bin/python"
)

TEXT_BLOCKS = "Q4_0"
"""Format of UMT5's matrices in its GGUF file."""

LOG = {"text": "get_learned_condition", "denoise": "sampling", "decode": "decode_first_stage"}
"""Stages in the log of stable-diffusion.cpp."""


def bench_clip(settings: VideoSettings, transformer: WanConfig, vae: WanVaeConfig) -> dict[str, Any]:
    """Make clips on every side, one process after the other.

    Args:
        settings: what to measure.
        transformer, vae: configurations of the models.
    """
    check_names("variants", settings.variants, VARIANTS)
    check_names("against with the stage clip", settings.against, ("diffusers", "stable-diffusion.cpp"))
    if settings.thresholds and not any("cache" in VARIANTS[name][1] for name in settings.variants):
        raise InvalidParameterError("thresholds: none of the variants has a cache; --variants teacache,magcache have")
    if settings.size == "5b" or len(settings.frames) != 1:
        raise InvalidParameterError("stage: clip is measured with the size 1.3b, 14b or tiny, and one number of frames")
    if "stable-diffusion.cpp" in settings.against and settings.peer_python is None:
        raise InvalidParameterError(f"peer_python: none for stable-diffusion.cpp: {REMEDY}")
    benchmark, prompts = Benchmark("video"), _prompts(settings)
    size = {"height": settings.height, "width": settings.width}
    sampling = {"num_inference_steps": settings.steps, "guidance_scale": settings.guidance_scale}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        scratch = Path(name)
        opened = VideoFolder(settings.model or _write_model(scratch / "original", settings, transformer, vae))
        vae, folder = PART_SIDES["vae"].config(opened.config("vae")), opened.path
        if "diffusers" in settings.against:
            folder = convert(opened, scratch / "diffusers", "diffusers", dtype=jnp.dtype(settings.dtype))
        latents = (settings.frames[0] + 3) // 4, *(side // vae.pixels_per_latent for side in size.values())
        noise = np.random.default_rng(0).standard_normal((1, vae.z_dim, *latents), np.float32)
        np.save(scratch / "noise.npy", noise)
        clip = {"num_frames": settings.frames[0], **size, "latents": str(scratch / "noise.npy")}
        ours: dict[str, Any] = {"folder": str(folder), "dtype": settings.dtype}
        whole = clip | sampling
        sides: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {"verax": ("verax", ours, whole)}
        for variant in settings.variants:
            load, options = VARIANTS[variant]
            given = (clip if "recipe" in options else whole) | options
            limits = [{"cache_threshold": value} for value in settings.thresholds if "cache" in options]
            for limit in limits or [{}]:
                side = " ".join(["verax", variant, *(f"{value:g}" for value in limit.values())])
                sides[side] = "verax", ours | load, given | limit
        if "diffusers" in settings.against:
            sides["diffusers"] = "diffusers", ours, whole
        if "stable-diffusion.cpp" in settings.against:
            sides |= _stable_diffusion_cpp(settings, folder, whole)
        answers = {side: _run(*work, scratch / slug(side), prompts, settings) for side, work in sides.items()}
    case = case_result(
        f"a clip of {settings.frames[0]} frames",
        "verax",
        {side: answer["samples"] for side, answer in answers.items()},
        settings.frames[0],
    )
    for side, answer in answers.items():
        case["sides"][side] |= answer["numbers"]
        if side != "verax" and not side.startswith(("stable-diffusion.cpp", "verax lightx2v")):
            case["sides"][side] |= _likeness(answers["verax"]["clips"], answer["clips"])
    level = library.level()
    asked = asdict(settings) | {"text_layers": settings.text_layers or UMT5Config().num_layers}
    layers = f"{transformer.num_layers} layers" if settings.layers else ""
    text = "all of UMT5-XXL" if settings.text_layers is None else f"{settings.text_layers} layers of UMT5-XXL"
    kind = settings.dtype if "diffusers" in settings.against else TEXT_BLOCKS
    name, model = settings.size, f"{settings.size} text to video{f', {layers}' if layers else ''}"
    weights = f"Random weights in {settings.dtype}, {text} in {kind}"
    if settings.model is not None:
        asked["model"] = name = model = opened.name
        weights = f"Computed in {settings.dtype}"
    return benchmark.result(
        slug(name, layers, "clip", f"{settings.steps} steps {settings.guidance_scale:g}", settings.dtype)
        + f"-{settings.frames[0]}x{settings.height}x{settings.width}"
        + "".join(f"-{slug(name)}" for name in (*settings.against, level or "") if name),
        title=f"A clip: {model}, {settings.frames[0]} x {settings.height} x {settings.width}, {settings.steps} steps, "
        f"guidance {settings.guidance_scale:g}",
        intro=f"{weights}. Each side has a process of its own, one after "
        f"the other: {settings.runs} clips after {settings.warmup} that do not count, from the prompt to images in a "
        "folder. Peak memory is the process's, weights included. PSNR and SSIM are against the first side.",
        settings=asked,
        versions={name: version for answer in answers.values() for name, version in answer["versions"].items()},
        tables=[sides_table([case])],
        cases=[case],
    )


def _prompts(settings: VideoSettings) -> list[str]:
    """Prompt of each clip. Without a file each is another one, since states of prompts are kept."""
    count = settings.warmup + settings.runs
    if settings.prompts is None:
        return [f"{PROMPT} {i + 1}." for i in range(count)]
    lines = list(filter(str.strip, settings.prompts.read_text(encoding="utf-8-sig").splitlines()))
    if not lines:
        raise InvalidParameterError(f"prompts: {settings.prompts} has none")
    return list(itertools.islice(itertools.cycle(lines), count))


def _likeness(clips: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> dict[str, float | None]:
    """PSNR of the other clips, the mean and the worst, and the worst SSIM; None if nothing differs."""
    compared = [compare_clips(clip, other) for clip, other in zip(clips, others, strict=True)]
    psnr = [one.clip_psnr for one in compared if one.max_difference]
    mean, worst = (fmean(psnr), min(psnr)) if psnr else (None, None)
    return {"psnr": mean, "worst_psnr": worst, "worst_ssim": min(one.clip_ssim for one in compared)}


def _stable_diffusion_cpp(
    settings: VideoSettings, folder: Path, clip: Mapping[str, Any]
) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Sides of stable-diffusion.cpp: with the weights of the files, and with Q8_0 where verax has int8."""
    load = {
        "diffusion_model_path": str(folder / "model.safetensors"),
        "t5xxl_path": str(folder / f"{PARTS['text_encoder'].original}.gguf"),
        "vae_path": str(folder / f"{PARTS['vae'].original}.safetensors"),
        "n_threads": num_cores(),
        "diffusion_flash_attn": True,
    }
    options = {"video_frames": clip["num_frames"], "cfg_scale": clip["guidance_scale"]}
    options |= {"height": clip["height"], "width": clip["width"], "sample_steps": clip["num_inference_steps"]}
    options |= {"sample_method": "euler", "flow_shift": 3.0}
    sides = {"stable-diffusion.cpp": ("stable_diffusion_cpp", load, options)}
    if "int8" in settings.variants:
        rules = {"tensor_type_rules": r"model\.diffusion_model\.blocks.*weight=q8_0"}
        sides["stable-diffusion.cpp Q8_0"] = "stable_diffusion_cpp", load | rules, options
    return sides


def _run(
    engine: str,
    load: Mapping[str, Any],
    clip: Mapping[str, Any],
    folder: Path,
    prompts: Sequence[str],
    settings: VideoSettings,
) -> dict[str, Any]:
    """Clips of a side: `samples`, `versions`, frames of the counted `clips`, and numbers of the last one."""
    python = sys.executable
    if engine == "stable_diffusion_cpp":
        assert settings.peer_python is not None
        python = settings.peer_python
    with WorkerProcess(engine, python, engines, engine, remedy=REMEDY) as process:
        versions, answers = process.load(**load), []
        for i, prompt in enumerate(prompts):
            (folder / str(i)).mkdir(parents=True)
            answers.append(process.ask(**clip, prompt=prompt, folder=str(folder / str(i))))
    stages, text = answers[-1]["result"], process.printed
    if engine == "stable_diffusion_cpp":
        taken = {stage: re.findall(rf"\b{words} completed, taking ([\d.]+)s", text) for stage, words in LOG.items()}
        stages["seconds"] = {stage: float(seconds[-1]) for stage, seconds in taken.items() if seconds}
        sizes = dict(re.findall(r"(\w+) compute buffer size: ([\d.]+) MB", text))
        stages["buffers"] = {"decode": max(int(1e6 * float(size)) for name, size in sizes.items() if "vae" in name)}
    seconds = tuple(answer["seconds"] for answer in answers)
    return {
        "samples": Samples(seconds[settings.warmup :], seconds[: settings.warmup]),
        "versions": versions,
        "clips": [np.load(folder / str(i) / "frames.npy") for i in range(settings.warmup, len(prompts))],
        "numbers": {
            "stages": stages["seconds"],
            "computed": stages.get("computed"),
            "peak_bytes": answers[-1]["peak_bytes"],
            "start_s": process.start_s,
            **{f"{stage}_s": stages["seconds"].get(stage) for stage in LOG},
            "decode_bytes": stages["buffers"].get("decode"),
        },
    }


# The model


def _write_model(folder: Path, settings: VideoSettings, transformer: WanConfig, vae: WanVaeConfig) -> Path:
    """Folder of the original layout with random weights."""
    shutil.copytree(builtin.video_model() / "tokenizer", folder / TOKENIZER)
    fields = ("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "num_layers", "out_dim", "eps", "text_dim")
    sizes = {name: getattr(transformer, name) for name in fields}
    write_json(folder / "config.json", {"_class_name": "WanModel", "model_type": "t2v", "text_len": 512, **sizes})
    write_json(folder / f"{PARTS['vae'].original}.json", asdict(vae))
    dtype = jnp.dtype(settings.dtype)
    tensor = lambda name, shape: NewTensor(dtype, shape, partial(random_weight, name, shape, dtype))
    for stem, kind, part in (("model", WanModel, transformer), (PARTS["vae"].original, WanVae, vae)):
        tensors = {name: tensor(name, shape) for name, shape in _shapes(kind, part).items()}
        for _ in write_shards(folder, stem, tensors, max_shard_bytes=1 << 40):
            pass
    config = UMT5Config()
    if settings.size == "tiny":
        config = replace(config, d_model=transformer.text_dim, d_kv=8, d_ff=64, num_heads=4)
    if settings.text_layers is not None:  # and no more rows of the embedding than the built-in tokenizer has
        config = replace(config, num_layers=settings.text_layers, vocab_size=1024)
    stem = PARTS["text_encoder"].original
    write_json(folder / f"{stem}.json", {**PARTS["text_encoder"].config, **asdict(config)})
    _write_gguf(folder / f"{stem}.gguf", config)
    return folder


def _shapes(kind: Callable[..., nnx.Module], config: Any) -> dict[str, tuple[int, ...]]:
    state = nnx.state(nnx.eval_shape(lambda: kind(config, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}


def _write_gguf(path: Path, config: UMT5Config) -> None:
    """Write UMT5 with transformers' names. Matrices of one shape are the same, since quantising takes long."""
    writer, kinds = gguf.GGUFWriter(path, "t5encoder"), gguf.GGMLQuantizationType
    stored: dict[Any, np.ndarray] = {}
    for name, shape in _shapes(UMT5EncoderModel, config).items():
        kind = kinds[TEXT_BLOCKS if len(shape) == 2 and "pos_embedding" not in name else "F32"]
        if (kind, shape) not in stored:
            stored[kind, shape] = gguf.quantize(random_weight(name, shape), kind)
        theirs, *_ = UMT5.forward(name) or (name,)
        writer.add_tensor(theirs, stored[kind, shape], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
