"""Stages of a video pipeline: time of a call, of compiling, calls until compiling pays, and memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax._compat import empty_compilation_cache
from verax.bench.harness import Benchmark, case_result, count_products, time_sides
from verax.bench.results import sides_table, slug
from verax.bench.settings import VideoSettings
from verax.bench.video.baselines import Work, make_baseline
from verax.bench.video.clips import bench_clip
from verax.checkpoint.load import random_weights
from verax.checkpoint.video.parts import VAE_2_2, WAN, wan_vae_names
from verax.errors import InvalidParameterError
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.video.load import divided_component
from verax.video.networks import latents_at_once
from verax.video.programs import Program

TITLES = {"transformer": "transformer, a forward pass", "vae": "VAE, decoding"}

WORDS, PATCHES = 512, 257
"""Tokens of a prompt and of an image that condition the transformer, as in the published pipelines."""


SIZES: Mapping[str, tuple[WanConfig, WanVaeConfig]] = {
    "1.3b": (WAN_CONFIGS["i2v-1.3b"], WanVaeConfig()),
    "14b": (WAN_CONFIGS["i2v-14b"], WanVaeConfig()),
    "5b": (WAN_CONFIGS["ti2v-5b"], WanVaeConfig.from_hf(VAE_2_2)),
    "tiny": (
        WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=2, in_dim=36, text_dim=32, image_dim=32),
        WanVaeConfig(base_dim=8, dim_mult=(1, 2, 2, 2), num_res_blocks=1),
    ),
}
"""Transformer and VAE of SkyReels-V2's two published sizes of image to video, of Wan2.2's 5B, and of one for tests."""


def bench_video(settings: VideoSettings) -> dict[str, Any]:
    """Time stages with random weights in real sizes."""
    if settings.stage == ("clip",):
        config, vae = SIZES[settings.size]
        layers = settings.layers or config.num_layers
        return bench_clip(settings, replace(config, in_dim=config.out_dim, image_dim=None, num_layers=layers), vae)
    frames, stages, dtype = settings.frames, settings.stage, settings.dtype
    benchmark = Benchmark("video")
    cases = []
    for stage, count in itertools.product(stages, frames):
        case = _case(work(stage, count, settings), count, settings)
        rate = benchmark.limits[f"matmul_{dtype}_gflop_per_s"]
        for side in case["sides"].values():
            side["gflop_per_s"] = side["rate"] / 1e9
        case["fraction_of_limit"] = case["sides"]["verax"]["gflop_per_s"] / rate
        case["sides"]["verax"] |= {key: case[key] for key in ("fraction_of_limit", "compile_s", "compile_cached_s")}
        cases.append(case)
    layers = f", {settings.layers} layers" if settings.layers else ""
    what = "text and image to video" if settings.size == "5b" else "image to video"
    clip = f"{'-'.join(map(str, frames))}x{settings.height}x{settings.width}"
    return benchmark.result(
        slug(settings.size, layers, *stages, dtype, clip),
        title=f"Video: {settings.size} {what}{layers}, {settings.height} x {settings.width}, {dtype}",
        intro=f"Random weights, the same on all sides. {settings.runs} rounds after {settings.warmup} of "
        f"warm-up; the sides take turns in a round. A step with guidance is two "
        "forward passes. Compiling includes tracing. The limit is the measured rate of matmuls. In the rows of other "
        "sides: the factor by which verax is faster, their first call, the calls after which ours, compiling included, "
        "took less time, and the root mean square of the difference over the root mean square of their result.",
        settings=asdict(settings),
        tables=[sides_table(cases)],
        cases=cases,
    )


def break_even(compile_s: float, ours_s: float, theirs_first_s: float, theirs_s: float) -> int | None:
    """Number of calls after which ours, compiled first, has taken less time than theirs; None if it never does.

    Args:
        compile_s: before our first call.
        ours_s, theirs_s: of a call.
        theirs_first_s: of their first, which may take longer.
    """
    if ours_s >= theirs_s:
        return None
    return max(1, math.floor((compile_s - (theirs_first_s - theirs_s)) / (theirs_s - ours_s)) + 1)


def _case(todo: Work, frames: int, settings: VideoSettings) -> dict[str, Any]:
    """A stage timed on all sides."""
    component = todo.component
    products = count_products(todo.run, component.shapes, *todo.shapes)
    others: dict[str, dict[str, Any]] = {}
    with component.weights() as weights:
        inputs = tuple(map(jnp.asarray, todo.inputs))
        if todo.prepare is not None:
            inputs = Program(todo.prepared)(weights, *inputs)
        with empty_compilation_cache():
            _, compile_s = _compiled(todo, weights, inputs)
            program, cached_s = _compiled(todo, weights, inputs)
        ours = np.asarray(program(weights, *inputs))
        sides: dict[str, Callable[[], Any]] = {"verax": lambda: jax.block_until_ready(program(weights, *inputs))}
        for name in settings.against:
            if name == "openvino" and todo.stage == "vae":
                continue  # it has no operation for the nearest-exact upsampling
            sides[name], to_numpy = make_baseline(name, todo, settings.dtype)
            begin = time.perf_counter()
            theirs = to_numpy(sides[name]())
            first = time.perf_counter() - begin
            apart = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
            others[name] = {"first_s": first, "difference": apart}
        title, runs = f"{todo.stage}, {frames} frames", settings.runs
        samples = time_sides(sides, runs=runs, warmup=settings.warmup, title=title, trace=settings.trace)
    for name, other in others.items():
        other["break_even"] = break_even(compile_s, samples["verax"].median, other["first_s"], samples[name].median)
    more = {"flops": float(products), "compile_s": compile_s, "compile_cached_s": cached_s}
    case = case_result(f"{TITLES[todo.stage]}, {frames} frames", "verax", samples, float(products), **more)
    for name, other in others.items():
        case["sides"][name] |= other
    return {"stage": todo.stage, "frames": frames, **case}


def _compiled(todo: Work, weights: Any, inputs: Any) -> tuple[Program, float]:
    """A program that is ready for a call, and the seconds that tracing and compiling took."""
    jax.clear_caches()  # what is traced already would not be traced again
    program = Program(todo.run)
    begin = time.perf_counter()
    program.memory(weights, *inputs)
    return program, time.perf_counter() - begin


def work(stage: str, frames: int, settings: VideoSettings) -> Work:
    """Work of a stage for a clip: one forward pass of the transformer, or decoding latents.

    Args:
        stage: `transformer` or `vae`.
        frames: of the clip, 4n + 1.
        settings: the sizes, with sides that divide into tokens.
    """
    height, width, (transformer, vae) = settings.height, settings.width, SIZES[settings.size]
    pixels = vae.pixels_per_latent
    token = pixels * transformer.patch
    if frames % 4 != 1 or height % token or width % token or min(frames, height, width) < 1:
        raise InvalidParameterError(
            f"frames, height, width: expected 4n + 1 frames and sides divisible by {token}, got {frames}, {height} x "
            f"{width}"
        )
    rng = np.random.default_rng(1)
    latents = 1, (frames + 3) // 4, height // pixels, width // pixels
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    if stage == "transformer":
        config: Any = replace(transformer, num_layers=settings.layers or transformer.num_layers)
        kind, names, function, prepare = WanModel, WAN, _forward, _encode_context
        image = () if config.image_dim is None else (normal(1, PATCHES, config.image_dim),)
        inputs = normal(*latents, config.in_dim), np.asarray([500], np.int32), normal(1, WORDS, config.text_dim), *image
    else:
        chunk = latents_at_once(vae, height, width)
        config, kind, names, prepare = vae, WanVae, wan_vae_names(asdict(vae)), None
        function, inputs = (lambda model, latents: model.decode(latents, chunk=chunk)), (normal(*latents, vae.z_dim),)
    dtype = jnp.dtype(settings.dtype)
    weights = random_weights(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))), dtype)

    def load(abstract: nnx.Module) -> nnx.Module:
        graph, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        filled = [(path, leaf.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, leaf in flat]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    component = divided_component(stage, cast(Any, kind), config, dtype, load, keep=None)
    return Work(stage, component, weights, names, inputs, function, prepare, config)


def _encode_context(model: WanModel, latents: Any, timesteps: Any, text: Any, image: Any = None) -> tuple[Any, ...]:
    return latents, timesteps, model.encode_context(text, image)


def _forward(model: WanModel, latents: Any, timesteps: Any, context: Any) -> Any:
    return model(latents, timesteps, context, attention="auto")
