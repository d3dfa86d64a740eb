"""Recipe of the built-in video model's VAE: sizes, loss, schedule, and the statistics of its latents.

The VAE learns to reconstruct drawn clips (absolute and squared errors of colours). A small Kullback-Leibler term keeps
its latents near a unit normal (Kingma and Welling, 2014, arXiv:1312.6114).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from recipes.video.shapes import draw, scenes
from verax import ops
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.models.wan.vae_layers import Tails
from verax.nn import CausalConv3d, Conv2d
from verax.ops.conv import ConvShape, Padding, Stride
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear

CONFIG = WanVaeConfig(
    base_dim=16, dim_mult=(1, 2, 4, 4), num_res_blocks=1, latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16
)
"""Sizes: 2.6 million parameters; layers, factors and latent channels of the published model. Statistics come last."""

SCHEDULE = Schedule(steps=1600, peak_learning_rate=2e-3, warmup_steps=40, weight_decay=0.0, beta2=0.99)

DECODER_SCHEDULE = Schedule(steps=600, peak_learning_rate=1e-3, warmup_steps=20, weight_decay=0.0, beta2=0.99)
"""Schedule of the decoder alone, on whole clips. The latents, and models trained on them, do not change."""

Cuts = tuple[tuple[float, tuple[tuple[int, int, int], ...]], ...]

CUTS: Cuts = (
    (0.45, ((32, 1, 32), (32, 1, 32), (32, 1, 32), (8, 1, 64))),
    (0.78, ((4, 5, 32), (4, 5, 32), (4, 5, 32), (1, 5, 64))),
    (0.97, ((2, 9, 32), (2, 9, 32), (2, 9, 32), (1, 9, 64))),
    (1.0, ((1, 17, 64),)),
)
"""Sizes (clips, frames, height and width) of consecutive batches, each list up to a part of the schedule. Most of the
work is to reconstruct single frames, which crops of many clips teach cheaply. Whole pictures teach the middle attention
its number of pixels. Motion comes later, whole clips last."""

SQUARES = 2.0
"""Weight of squared errors, relative to absolute ones."""

DIVERGENCE = 1e-5
"""Weight of the Kullback-Leibler divergence, per element of the latents."""

LOG_VARIANCE = -6.0
"""Initial log-variance of the latents. With the usual 0, noise as large as the means lets the decoder learn only mean
colours."""

AVERAGE = 0.998
FRAMES = 17
SIZE = 64
STATISTICS_CLIPS = 64


def train_vae(output: Path, *, steps: int | None = None, seed: int = 0, **run: Any) -> WanVae:
    """Train the VAE, with state, log and plot in `output`, and return it in float32 with measured statistics.

    `run`: further options of `verax.train.loop.train`. Other arguments as in `recipe.train_builtin`.
    """
    schedule = SCHEDULE.of(steps)
    graph, params = initial(seed)
    trained = train(
        lambda params, batch: loss(nnx.merge(graph, params), batch),
        params,
        lambda start: batches(seed, start, schedule.steps, CUTS),
        schedule,
        output,
        settings={"seed": seed},
        save_every=100,
        average=AVERAGE,
        counted="pixels",
        loss_unit="L1 and terms",
        **run,
    )
    return _with_statistics(nnx.merge(graph, trained), seed)


def refine_decoder(vae: WanVae, output: Path, *, steps: int | None = None, seed: int = 0, **run: Any) -> WanVae:
    """Train the decoder further, with state, log and plot in `output`, and return the model with that decoder.

    `vae`: VAE from `train_vae`; its encoder is not changed. Other arguments as in `train_vae`.
    """
    schedule = DECODER_SCHEDULE.of(steps)
    graph, decoder, fixed = nnx.split(vae, lambda path, _: path[0] in ("decoder", "conv2"), ...)
    trained = train(
        lambda params, batch: loss(nnx.merge(graph, params, fixed), batch),
        decoder,
        lambda start: batches(seed + 1, start, schedule.steps, CUTS[-1:]),
        schedule,
        output,
        settings={"seed": seed},
        save_every=100,
        average=AVERAGE,
        counted="pixels",
        loss_unit="L1 and terms",
        **run,
    )
    return nnx.merge(graph, trained, fixed)


def initial(seed: int) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Initial weights of a network that treats each frame separately.

    Kernels are zero for earlier frames, downsampling in time is a mean of two, and upsampling a repetition.
    Residual branches are zero at first.
    """
    model = WanVae(CONFIG, rngs=nnx.Rngs(seed))
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, CausalConv3d | Conv2d):
            continue
        weight = module.weight[...]
        # `nn` initialises with a third of the variance that preserves the scale of values.
        weight = 3**0.5 * weight
        if path[-2:] == ("residual", "6") or path[-1] == "proj":
            weight = jnp.zeros_like(weight)
        elif path[-1] == "time_conv":
            doubled = weight.shape[0] // weight.shape[1] == 2
            same = jnp.tile(jnp.eye(weight.shape[1]), (weight.shape[0] // weight.shape[1], 1))
            taps = jnp.asarray([0.0, 0.0, 1.0] if doubled else [0.0, 0.5, 0.5])
            weight = same[:, :, None, None, None] * taps[:, None, None]
        elif weight.shape[2:] == (3, 3, 3):
            weight = (3**0.5 * weight).at[:, :, :2].set(0.0)
        module.weight[...] = weight
    model.conv1.weight[...] = model.conv1.weight[...].at[CONFIG.z_dim :].multiply(0.1)
    model.conv1.bias[...] = model.conv1.bias[...].at[CONFIG.z_dim :].set(LOG_VARIANCE)
    return nnx.split(model)


def batches(seed: int, start: int, steps: int, plan: Cuts) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches from step `start` of `steps` on, cut according to `plan`.

    Each has `pixels`, and the `seed` of the noise.
    """
    for step in count(start):
        cuts = next((cuts for end, cuts in plan if step < end * steps), plan[-1][1])
        clips, frames, size = cuts[step % len(cuts)]
        rng = np.random.default_rng((seed, step))
        drawn = FRAMES if frames > 1 else 1
        pixels = draw(scenes(seed, step * CUTS[0][1][0][0], clips), frames=drawn, height=SIZE, width=SIZE)
        t, y, x = (rng.integers(whole - cut + 1) for whole, cut in ((drawn, frames), (SIZE, size), (SIZE, size)))
        yield {"pixels": pixels[:, t : t + frames, y : y + size, x : x + size], "seed": np.asarray(step, np.uint32)}


def loss(model: WanVae, batch: dict[str, Array]) -> Float[Array, ""]:
    """Loss of a batch. The factors of convolutions are rounded to bfloat16."""
    graph, params = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    frames = colours(batch["pixels"])
    with ops.use_implementations(
        conv2d=own_gradient_conv2d, conv3d=own_gradient_conv3d, linear=rounded_gradient_linear
    ):
        mean, log_variance = model.encode_distribution(frames)
        noise = jax.random.normal(jax.random.key(batch["seed"]), mean.shape)
        latents = mean + jnp.exp(0.5 * log_variance) * noise
        # Not `decode`: it clips, so that colours out of range would have no gradient.
        again = model.decoder(model.conv2(latents), Tails()).astype(jnp.float32)
    wrong = again - frames
    divergence = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - 1.0 - log_variance)
    return jnp.mean(jnp.abs(wrong)) + SQUARES * jnp.mean(wrong**2) + DIVERGENCE * divergence


def colours(pixels: UInt8[Array, "*B"] | UInt8[np.ndarray, "*B"]) -> Float[Array, "*B"]:
    """Colours from 0..255 to -1..1."""
    return jnp.asarray(pixels).astype(jnp.float32) / 127.5 - 1.0


def _with_statistics(model: WanVae, seed: int) -> WanVae:
    """Model whose configuration has the mean and standard deviation of each latent channel over training clips."""
    graph, params = nnx.split(model)
    encode = jax.jit(lambda params, pixels: nnx.merge(graph, params).encode_distribution(colours(pixels))[0])
    frames, size = CUTS[-1][1][-1][1:]
    drawn = [draw(scenes(seed, at, 2), frames=frames, height=size, width=size) for at in range(0, STATISTICS_CLIPS, 2)]
    latents = np.concatenate([encode(params, pixels) for pixels in drawn]).reshape(-1, CONFIG.z_dim)
    mean, std = (tuple(round(float(v), 4) for v in values) for values in (latents.mean(0), latents.std(0)))
    model.config = replace(CONFIG, latents_mean=mean, latents_std=std)
    return model


# Convolutions whose gradients are convolutions too, so that fast implementations run all three.
#
# XLA's own gradients of a convolution with few channels are ten times slower on a CPU. The gradient to the input is a
# convolution of the incoming gradient with the kernel turned round. The gradient to the kernel is a convolution of the
# input, with channels in the place of examples, by the incoming gradient. Operands are rounded to the weight's dtype.

Sides = tuple[tuple[int, int], ...]


def _convolve_fast(x: Array, weight: Array, stride: tuple[int, ...] = (1, 1, 1)) -> Array:
    """Convolution without padding, in the dtype of `x`, with float32 sums: the preferred one of GPUs rounds them."""
    on_cpu = ops.target().platform == "cpu"
    convolve = ops.conv3d.restricted() if on_cpu else ops.conv3d.implementations["reference"].function
    return convolve(x, weight, stride=stride, cache=x[:, :0])


def _spread(x: Array, low: tuple[int, ...], high: tuple[int, ...], between: tuple[int, ...]) -> Array:
    """Zeros around (cut off where negative) and between the elements of time, height and width."""
    edges = [(0, 0, 0), *zip(low, high, between, strict=True), (0, 0, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def _padded(x: Array, sides: Sides) -> Array:
    return _spread(x, tuple(low for low, _ in sides), tuple(high for _, high in sides), (0, 0, 0))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x: Array, weight: Array, stride: tuple[int, ...], sides: Sides) -> Array:
    return _convolve_fast(_padded(x, sides), weight, stride)


def _forward(x: Array, weight: Array, stride: tuple[int, ...], sides: Sides) -> tuple[Array, tuple[Array, Array]]:
    return _convolve(x, weight, stride, sides), (x.astype(weight.dtype), weight)


def _backward(
    stride: tuple[int, ...], sides: Sides, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, weight = saved
    kernel = weight.shape[2:]
    between = tuple(s - 1 for s in stride)
    dtype = gradient.dtype

    low = tuple(k - 1 - before for k, (before, _) in zip(kernel, sides, strict=True))
    spread = [(n - 1) * s + 1 for n, s in zip(gradient.shape[1:4], stride, strict=True)]
    high = tuple(n + k - 1 - a - m for n, k, a, m in zip(x.shape[1:4], kernel, low, spread, strict=True))
    turned = jnp.swapaxes(jnp.flip(weight, (2, 3, 4)), 0, 1)
    to_x = _convolve_fast(_spread(gradient, low, high, between), turned).astype(dtype)

    padded = jnp.moveaxis(_padded(x, sides), 0, -1)  # [T, H, W, C, B]
    channels_first = jnp.moveaxis(padded, 3, 0).astype(jnp.float32)
    by = jnp.moveaxis(_spread(gradient.astype(weight.dtype), (0,) * 3, (0,) * 3, between), -1, 0)  # [O, B, T, H, W]
    to_weight = jnp.moveaxis(_convolve_fast(channels_first, by), -1, 0)
    kt, kh, kw = kernel  # a stride may leave more at the end than the kernel has seen
    return to_x, to_weight[:, :, :kt, :kh, :kw].astype(weight.dtype)


_convolve.defvjp(_forward, _backward)


def own_gradient_conv3d(
    x: Float[Array, "B T H W C"],
    weight: Float[Array, "O C kt kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
    cache: Float[Array, "B P H W C"] | None = None,
) -> Float[Array, "B Tout Hout Wout O"]:
    """`ops.conv3d` with gradients that are convolutions, for `ops.use_implementations`."""
    if cache is None and x.shape[1] == 1:
        weight = weight[:, :, -1:]  # what stands before a single frame is zeros
    shape = ConvShape(x.shape, weight.shape, stride, padding, None if cache is None else cache.shape)
    if cache is not None:
        x = jnp.concatenate([cache.astype(x.dtype), x], axis=1)
    y: Array = _convolve(x, weight, tuple(shape.stride), tuple(shape.sides))
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)


def own_gradient_conv2d(
    x: Float[Array, "B H W C"],
    weight: Float[Array, "O C kh kw"],
    bias: Float[Array, "O"] | None = None,
    *,
    stride: Stride = 1,
    padding: Padding = 0,
) -> Float[Array, "B Hout Wout O"]:
    """`ops.conv2d` with gradients that are convolutions, for `ops.use_implementations`."""
    shape = ConvShape(x.shape, weight.shape, stride, padding)
    y: Array = _convolve(x[:, None], weight[:, :, None], (1, *shape.stride), ((0, 0), *shape.sides))
    y = y[:, 0]
    return y if bias is None else (y + bias.astype(jnp.float32)).astype(x.dtype)
