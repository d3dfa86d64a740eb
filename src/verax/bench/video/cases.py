"""Stages of a video pipeline: time of a call, of compiling, calls until compiling pays, and memory."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax._compat import empty_compilation_cache
from verax._optional import require_optional
from verax.bench.embed.engines import compile_openvino
from verax.bench.harness import (
    Benchmark,
    case_result,
    count_products,
    error_ratio,
    import_torch,
    time_sides,
    timed,
    torch_device,
)
from verax.bench.results import sides_table, slug
from verax.bench.settings import VideoSettings
from verax.bench.video.clips import bench_clip
from verax.checkpoint.load import random_weights
from verax.compare.cases.video import PART_SIDES, RANDOM, reference_model
from verax.errors import InvalidParameterError
from verax.models.wan.model import WanModel
from verax.video.load import divided_component
from verax.video.networks import latents_at_once
from verax.video.programs import Component, Program

TITLES = {"transformer": "transformer, a forward pass", "vae": "VAE, decoding"}

WORDS, PATCHES = 512, 257
"""Tokens of a prompt and of an image that condition the transformer, as in the published pipelines."""

CONTEXT = (
    "verax computes the cross-attention's keys and values once a clip, before the passes that are timed; the others "
    "compute them in every pass."
)
"""Sentence of a page on the work that the sides do not share."""

_SMALL = RANDOM["1.3b"]
_LARGE = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40, "added_kv_proj_dim": 5120}
_TINY = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": 2, "text_dim": 32}
_TINY |= {"image_dim": 32, "added_kv_proj_dim": 32}

SIZES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "1.3b": _SMALL,
    "14b": {**_SMALL, "transformer": _SMALL["transformer"] | _LARGE},
    "5b": RANDOM["5b"],
    "tiny": {"transformer": _SMALL["transformer"] | _TINY, "vae": RANDOM["tiny"]["vae"]},
}
"""Settings of transformer and VAE in diffusers' config.json: of SkyReels-V2's two published sizes of image to video, of
Wan2.2's 5B, and of one for tests."""


@dataclass(frozen=True)
class Work:
    """One stage that all sides compute.

    Attributes:
        settings: diffusers' config.json, from which both sides make their models.
        component: our model, with the weights when it is used.
        weights: weights by our names.
        inputs: inputs in our layout.
        function: traced function of the module and the inputs.
        prepare: function from the module and the inputs to the inputs of `function`; our side calls it once, untimed.
    """

    stage: str
    settings: Mapping[str, Any]
    component: Component[Any]
    weights: Mapping[str, np.ndarray]
    inputs: tuple[np.ndarray, ...]
    function: Callable[..., Any]
    prepare: Callable[..., Any]

    def run(self, weights: Any, *inputs: Any) -> Any:
        """Call `function` with weights in their place."""
        return self.function(self.component.module(weights), *inputs)

    def prepared(self, weights: Any, *inputs: Any) -> Any:
        """Call `prepare` with weights in their place."""
        return self.prepare(self.component.module(weights), *inputs)

    @property
    def shapes(self) -> Any:
        """Shapes and dtypes of the inputs of `function`."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs]
        return jax.eval_shape(self.prepared, self.component.shapes, *shapes)


def bench_video(settings: VideoSettings) -> dict[str, Any]:
    """Time stages with random weights in real sizes."""
    if settings.stage == ("clip",):
        config, vae = (PART_SIDES[part].config(one) for part, one in _settings(settings).items())
        return bench_clip(settings, replace(config, in_dim=config.out_dim, image_dim=None), vae)
    frames, stages, dtype = settings.frames, settings.stage, settings.dtype
    benchmark = Benchmark("video")
    todo = itertools.product(stages, frames)
    cases = [_case(work(stage, count, settings), count, settings, benchmark) for stage, count in todo]
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
        "took less time, and the root mean square of the difference over the root mean square of their result."
        + (f" {CONTEXT}" if "transformer" in stages and settings.against else ""),
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


def _case(todo: Work, frames: int, settings: VideoSettings, benchmark: Benchmark) -> dict[str, Any]:
    """A stage timed on all sides."""
    component = todo.component
    products = count_products(todo.run, component.shapes, *todo.shapes)
    others: dict[str, dict[str, Any]] = {}
    with component.weights() as weights:
        inputs = Program(todo.prepared)(weights, *map(jnp.asarray, todo.inputs))
        with empty_compilation_cache():
            _, compile_s = _compiled(todo, weights, inputs)
            program, cached_s = _compiled(todo, weights, inputs)
        ours = np.asarray(program(weights, *inputs))
        sides: dict[str, Callable[[], Any]] = {"verax": lambda: jax.block_until_ready(program(weights, *inputs))}
        for name in settings.against:
            if name == "openvino" and todo.stage == "vae":
                continue  # it has no operation for the nearest-exact upsampling
            sides[name], to_numpy = make_baseline(name, todo, settings.dtype)
            theirs, first_s = timed(lambda run=sides[name], to_numpy=to_numpy: to_numpy(run()))
            others[name] = {"first_s": first_s, "difference": error_ratio(ours, theirs)}
        title, runs = f"{todo.stage}, {frames} frames", settings.runs
        samples = time_sides(sides, runs=runs, warmup=settings.warmup, title=title, trace=settings.trace)
    for name, other in others.items():
        other["break_even"] = break_even(compile_s, samples["verax"].median, other["first_s"], samples[name].median)
    reached = products / samples["verax"].median / 1e9 / benchmark.limits[f"matmul_{settings.dtype}_gflop_per_s"]
    others["verax"] = {"fraction_of_limit": reached, "compile_s": compile_s, "compile_cached_s": cached_s}
    more = {"flops": float(products), **others["verax"]}
    case = case_result(f"{TITLES[todo.stage]}, {frames} frames", "verax", samples, float(products), **more)
    for name, side in case["sides"].items():
        side |= {"gflop_per_s": side["rate"] / 1e9, **others[name]}
    return {"stage": todo.stage, "frames": frames, **case}


def _compiled(todo: Work, weights: Any, inputs: Any) -> tuple[Program, float]:
    """A program that is ready for a call, and the seconds that tracing and compiling took."""
    jax.clear_caches()  # what is traced already would not be traced again
    program = Program(todo.run)
    return program, timed(lambda: program.memory(weights, *inputs))[1]


def _settings(settings: VideoSettings) -> dict[str, dict[str, Any]]:
    """Settings of transformer and VAE in diffusers' config.json, with the number of layers that is asked for."""
    layers = {"num_layers": settings.layers} if settings.layers else {}
    return {**SIZES[settings.size], "transformer": SIZES[settings.size]["transformer"] | layers}


def work(stage: str, frames: int, settings: VideoSettings) -> Work:
    """Work of a stage for a clip: one forward pass of the transformer, or decoding latents.

    Args:
        stage: `transformer` or `vae`.
        frames: of the clip, 4n + 1.
        settings: the sizes, with sides that divide into tokens.
    """
    height, width, parts = settings.height, settings.width, _settings(settings)
    transformer, vae = (PART_SIDES[part].config(one) for part, one in parts.items())
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
        config, function, prepare = transformer, _forward, _encode_context
        image = () if config.image_dim is None else (normal(1, PATCHES, config.image_dim),)
        inputs = normal(*latents, config.in_dim), np.asarray([500], np.int32), normal(1, WORDS, config.text_dim), *image
    else:
        chunk = latents_at_once(vae, height, width)
        config, prepare = vae, lambda model, latents: (latents,)
        function = lambda model, latents: model.decode(latents, chunk=chunk)
        inputs = (normal(*latents, vae.z_dim),)
    dtype, kind = jnp.dtype(settings.dtype), PART_SIDES[stage].build
    weights = random_weights(nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0))), dtype)

    def load(abstract: nnx.Module) -> nnx.Module:
        graph, state = nnx.split(abstract)
        fill = lambda path, leaf: leaf.replace(jnp.asarray(weights[".".join(map(str, path))]))
        return nnx.merge(graph, nnx.map_state(fill, state))

    component = divided_component(stage, cast(Any, kind), config, dtype, load, keep=None)
    return Work(stage, parts[stage], component, weights, inputs, function, prepare)


def _encode_context(model: WanModel, latents: Any, timesteps: Any, text: Any, image: Any = None) -> tuple[Any, ...]:
    return latents, timesteps, model.encode_context(text, image)


def _forward(model: WanModel, latents: Any, timesteps: Any, context: Any) -> Any:
    return model(latents, timesteps, context, attention="auto")


# Baselines: diffusers and OpenVINO, with our weights


def make_baseline(name: str, todo: Work, dtype: str) -> tuple[Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Call of a stage with our weights in `diffusers`, `torch.compile` or `openvino`, and a function from its result to
    float32 in our layout."""
    torch = import_torch()
    device = torch_device(torch)
    weight = lambda name: np.asarray(todo.weights[name], np.float32)
    model = reference_model(todo.stage, todo.settings, weight, dtype).to(device)
    arguments = _arguments(todo, torch, device, getattr(torch, dtype))
    in_our_layout = lambda x: x.transpose(0, 2, 3, 4, 1)  # diffusers has channels first
    if name == "openvino":
        run = _openvino_call(torch, model, arguments, dtype)
        return run, lambda tensor: in_our_layout(tensor.data.astype(np.float32))
    if name == "torch.compile" and todo.stage == "vae":  # decode() is a loop over latents around it
        model.decoder = torch.compile(model.decoder)
    elif name == "torch.compile":
        model = torch.compile(model)

    def run() -> Any:
        with torch.inference_mode():
            return (model.decode if todo.stage == "vae" else model)(**arguments)[0]

    return run, lambda tensor: in_our_layout(tensor.float().cpu().numpy())


def _arguments(todo: Work, torch: Any, device: str, dtype: Any) -> dict[str, Any]:
    """Inputs of a stage by diffusers' names, in its layout."""

    def tensor(x: np.ndarray, *axes: int) -> Any:
        array = torch.from_numpy(np.ascontiguousarray(x.transpose(axes) if axes else x))
        return array.to(device, dtype if array.is_floating_point() else torch.long)

    inputs, config = todo.inputs, todo.component.config
    if todo.stage == "vae":
        mean, std = (np.asarray(x, np.float32) for x in (config.latents_mean, config.latents_std))
        return {"z": tensor(inputs[0] * std + mean, 0, 4, 1, 2, 3), "return_dict": False}
    latents, timesteps, text, *image = inputs
    return {
        "hidden_states": tensor(latents, 0, 4, 1, 2, 3),
        "timestep": tensor(timesteps),
        "encoder_hidden_states": tensor(text),
        **({"encoder_hidden_states_image": tensor(image[0])} if image else {}),
        "return_dict": False,
    }


def _openvino_call(torch: Any, model: Any, arguments: dict[str, Any], dtype: str) -> Callable[[], Any]:
    """The model converted by `openvino.convert_model`, compiled for its sizes on all cores."""
    openvino = require_optional("openvino")  # its usage statistics are off, see `bench.embed.engines`
    # With constants in bfloat16, results of OpenVINO 2026.4 are wrong by half. The hint rounds them again.
    model.float()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}

    class Positional(torch.nn.Module):
        """The model with tensors as its only arguments, in order, which is what converting can trace."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            return self.model(**dict(zip(inputs, values, strict=True)), return_dict=False)[0]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        converted = openvino.convert_model(Positional(), example_input=tuple(inputs.values()))
    converted.reshape({i: list(value.shape) for i, value in enumerate(inputs.values())})
    request = compile_openvino(openvino, converted, "LATENCY", dtype).create_infer_request()
    values = [value.numpy() for value in inputs.values()]

    def run() -> Any:
        request.infer(values, share_inputs=True)
        return request.get_output_tensor()

    return run
