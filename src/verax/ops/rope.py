"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), its scalings in checkpoints, and the exchange of
neighbours that its interleaved convention needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import MAX_NUMBER, Finite, Positive, file_of, read_value
from verax.files import JsonObject
from verax.ops._dispatch import Example, bfloat16, check_shapes, float32, operation
from verax.ops.pointwise import rms_norm


@dataclass(frozen=True)
class RotaryConfig:
    """Frequencies of the rotation.

    `kind` is Hugging Face's `rope_type`: `default`, `linear` (position interpolation), `llama3` (Llama 3.1's smooth
    interpolation by wavelength), `yarn` (Peng et al., 2023, arXiv:2309.00071), `longrope` (Ding et al., 2024,
    arXiv:2402.13753), `proportional` (Gemma 4: the lower frequencies are zero) or `dynamic` (as `default`: it changes
    texts longer than `max_position_embeddings` only, which no engine takes). `scaling` holds that kind's numbers.
    Only the first `fraction` of each head is rotated (Hugging Face's `partial_rotary_factor`).
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    divisors: tuple[float, ...] = ()
    """Divisors of the frequencies for the kind `divided`, as GGUF files store Llama 3.1's scaling, and `longrope`."""

    fraction: float = 1.0
    long_divisors: tuple[float, ...] = ()
    """Divisors of `longrope` in contexts longer than the one of pretraining."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, fraction: float | None = None) -> RotaryConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it) of a config.json.

        `fraction`: the family's `partial_rotary_factor`, for a file that has none; None if it rotates whole heads.

        Raises:
            UnsupportedModelError: for another `rope_type`, a number that it needs and the file lacks, a fraction
                where the family has none, or settings by kind of layer.
            CheckpointError: for a value of a wrong type, or out of range.
        """
        rope = JsonObject(rotary_settings(config), f"{file_of(config)}: rotary settings")
        if kinds := [name for name, value in rope.items() if isinstance(value, dict)]:
            raise UnsupportedModelError(
                f"{rope.where} by kind of layer ({', '.join(kinds)}) are not supported; this family has one rotation"
            )
        kind = read_value(rope, "rope_type", str, read_value(rope, "type", str, "default"))
        if kind not in _FREQUENCIES:
            raise UnsupportedModelError(
                f"rope_type {kind!r} is not supported; supported are {', '.join(sorted(_FREQUENCIES))}"
            )
        outer = read_value(config, "partial_rotary_factor", _Fraction, fraction or 1.0)
        rotated = read_value(rope, "partial_rotary_factor", _Fraction, outer)
        if rotated != 1 and fraction is None and kind != "proportional":
            raise UnsupportedModelError(
                f"{file_of(config)}: partial_rotary_factor {rotated} is not supported; this family rotates whole heads"
            )
        theta = read_value(rope, "rope_theta", _Base, read_value(config, "rope_theta", _Base, 10000.0))
        # As transformers: the outer key goes before the table's, and the config's own length stands in for both.
        original, longest = "original_max_position_embeddings", config.get("max_position_embeddings")
        rope[original] = config.get(original) or rope.get(original) or longest
        scaling = {name: read_value(rope, name, form, None) for name, form in _SCALING.items()}
        numbers = {name: float(value) for name, value in scaling.items() if value is not None}
        if kind == "proportional":
            numbers["proportion"], rotated = rotated, 1.0
        if kind == "longrope" and "factor" not in numbers and original in numbers and longest:
            numbers["factor"] = longest / numbers[original]
        divisors = read_value(rope, "divisors", tuple[Positive, ...], ())
        divisors = read_value(rope, "short_factor", tuple[Positive, ...], divisors)
        long_divisors = read_value(rope, "long_factor", tuple[Positive, ...], ())
        if kind == "longrope" and not (divisors and long_divisors):
            raise UnsupportedModelError(f"rope_type {kind!r} needs short_factor and long_factor in rope_scaling")
        missing = [name for name in _REQUIRED[kind] if name not in numbers]
        if missing:
            raise UnsupportedModelError(f"rope_type {kind!r} needs {', '.join(missing)} in rope_scaling")
        return cls(theta, kind, tuple(sorted(numbers.items())), divisors, rotated, long_divisors)

    def for_context(self, tokens: int) -> RotaryConfig:
        """Rotation in a context of `tokens` tokens: LongRoPE's depends on it."""
        if not self.long_divisors or tokens <= dict(self.scaling)["original_max_position_embeddings"]:
            return self
        return replace(self, divisors=self.long_divisors)

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Angular frequencies, float32 `[h]` in radians per token, and the factor on cos and sin.

        The first 2 h numbers of a head are rotated.
        """
        rotated = int(head_dim * self.fraction)
        base = np.float32(1.0) / _wavelengths(self.theta, rotated)
        frequencies, factor = _FREQUENCIES[self.kind](base, self, dict(self.scaling))
        return np.asarray(frequencies, np.float32), float(factor)


def rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before it) of a config.json.

    Raises:
        UnsupportedModelError: if it has both and they differ: of a file that transformers 5 has written and to which
            somebody has added a scaling, transformers reads the scaling alone, without the base next to it.
    """
    given, scaling = (read_value(config, name, dict, {}) for name in ("rope_parameters", "rope_scaling"))
    if given and any(given.get("rope_type" if key == "type" else key) != value for key, value in scaling.items()):
        raise UnsupportedModelError(
            f"{file_of(config)}: rope_scaling and rope_parameters differ; expected one of them, with all settings"
        )
    return given or scaling


def _wavelengths(theta: float, rotated: int) -> np.ndarray:
    """Tokens per radian of each frequency, float32 `[rotated / 2]`.

    The powers are rounded once, as torch's are but for one in a hundred; NumPy's powers of float32 miss the last bit of
    one in six. At token 100,000 that bit turns a key by 0.006 radians.
    """
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _default(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    return base, 1.0


def _linear(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    return base / np.float32(scaling["factor"]), 1.0


def _llama3(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """Frequencies of Llama 3.1: low ones are divided by `factor`, high ones kept, with a linear transition between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / scaling["factor"]), 1.0


def _yarn(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """Frequencies of YaRN (NTK by parts): low ones are divided by `factor`, high ones kept, with a ramp between.

    Every step is float32, in transformers' order.
    """
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    half = base.shape[0]

    def dimension(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(config.theta)

    low, high = dimension(scaling.get("beta_fast", 32.0)), dimension(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    kept = 1 - np.clip((np.arange(half, dtype=np.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
    divided = np.float32(1.0) / (np.float32(factor) * _wavelengths(config.theta, 2 * half))
    frequencies = divided * (1 - kept) + base * kept

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = magnitude(factor, mscale) / magnitude(factor, mscale_all)
        else:
            attention = magnitude(factor)
    return frequencies, attention


def _divided(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    if len(config.divisors) != len(base):
        raise UnsupportedModelError(f"{len(config.divisors)} rotary divisors do not fit heads of size {2 * len(base)}")
    return base / np.asarray(config.divisors, np.float32), 1.0


def _longrope(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """Frequencies of LongRoPE: each divided by a number of its own, and a factor for the longer context."""
    factor, attention = scaling["factor"], scaling.get("attention_factor")
    if attention is None:
        original = scaling["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _divided(base, config, scaling)[0], attention


def _proportional(base: np.ndarray, config: RotaryConfig, scaling: Mapping[str, float]) -> tuple[np.ndarray, float]:
    """Frequencies of Gemma 4: a part of them, and zeros, which rotate nothing."""
    rotated = int(scaling["proportion"] * 2 * len(base) // 2)
    return np.where(np.arange(len(base)) < rotated, base, 0) / np.float32(scaling.get("factor", 1.0)), 1.0


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
_FREQUENCIES |= {"divided": _divided, "proportional": _proportional, "dynamic": _default}
_Base = Annotated[float, msgspec.Meta(gt=1, le=MAX_NUMBER, description="a number above 1")]
_Fraction = Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0 and at most 1")]
_SCALING: dict[str, Any] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), Positive),
    **dict.fromkeys(("beta_fast", "beta_slow"), Positive),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), Finite),
    "truncate": bool,
}
"""Numbers of the scalings, and their types."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "proportional": (),
    "divided": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}


def rotary_tables(
    positions: Int[Array, "*B"], config: RotaryConfig, head_dim: int
) -> tuple[Float[Array, "*B h"], Float[Array, "*B h"]]:
    """cos and sin of each position's angles, float32 `[..., h]`; computed once and shared by all layers."""
    frequencies, factor = config.frequencies(head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    # XLA would compute both again in each layer, for each head: sines take longer than a product, and to compile.
    return jax.lax.optimization_barrier((jnp.cos(angles) * factor, jnp.sin(angles) * factor))


def _check(x: Any, cos: Any, sin: Any) -> None:
    h, H = cos.shape[-1], x.shape[-1]
    if 2 * h > H:
        raise InvalidParameterError(f"cos: expected at most {H // 2} angles for heads of size {H}, got {h}")
    tokens, angles = x.shape[:-2], cos.shape[:-1]
    if len(angles) > len(tokens) or any(n not in (1, T) for T, n in zip(tokens[::-1], angles[::-1], strict=False)):
        raise InvalidParameterError(f"cos: expected angles of tokens {list(tokens)}, got {list(angles)}")
    check_shapes(sin=(sin, cos.shape))


def _check_both(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, eps: Any) -> None:
    H = q.shape[-1]
    check_shapes(k=(k, (*q.shape[:-2], *k.shape[-2:-1], H)), q_weight=(q_weight, (H,)), k_weight=(k_weight, (H,)))
    _check(q, cos, sin)


@operation(check=_check)
def apply_rotary(
    x: Float[Array, "*B N H"], cos: Float[Array, "*B h"], sin: Float[Array, "*B h"]
) -> Float[Array, "*B N H"]:
    """Rotate each head's halves `(x1, x2)` to `(x1 cos - x2 sin, x2 cos + x1 sin)`: the half-split convention.

    If H is more than 2 h, the first 2 h numbers are rotated, and the others unchanged.

    Raises:
        InvalidParameterError: for more angles than halves hold, of other tokens, or other sines than cosines.
    """
    h = cos.shape[-1]
    halves = x[..., : 2 * h].reshape(*x.shape[:-1], 2, h)
    cos, sin = cos[..., None, None, :], sin[..., None, None, :]
    # Halves that change places are one loop for XLA. Halves that are put together are three, and slower to compile.
    signs = jnp.asarray([[-1.0], [1.0]], jnp.float32)
    rotated = (halves * cos + halves[..., ::-1, :] * (sin * signs)).reshape(*x.shape[:-1], 2 * h)
    return rotated if x.shape[-1] == 2 * h else jnp.concatenate([rotated, x[..., 2 * h :]], axis=-1)


apply_rotary.examples = [Example((float32(4, 16, 128), float32(4, 64), float32(4, 64)))]


@operation(fused=True, check=_check_both)
def norm_rotary(
    q: Float[Array, "*B N H"],
    k: Float[Array, "*B K H"],
    q_weight: Float[Array, "H"],
    k_weight: Float[Array, "H"],
    cos: Float[Array, "*B h"],
    sin: Float[Array, "*B h"],
    eps: float,
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"]]:
    """`apply_rotary(rms_norm(x, weight, eps), cos, sin)` of queries and of keys, as Qwen3 and Gemma 3 have it.

    Raises:
        InvalidParameterError: as `apply_rotary`, and for keys or weights that do not fit the queries.
    """
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)


norm_rotary.examples = [
    Example((float32(4, 16, 128), float32(4, 8, 128), *[bfloat16(128)] * 2, *[float32(4, 64)] * 2, 1e-6))
]


@operation
def swap_pairs(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """`(x2, x1, x4, x3, ...)` for `(x1, x2, x3, x4, ...)` along the last axis, which is even."""
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


# XLA:TPU reverses an axis of two in a layout with the tokens last. So it copied the queries and keys of Wan there and
# back and, where a kernel fixes the layout of attention's inputs, wrote tables of cos and sin out for all heads, which
# it kept from layer to layer. A permutation in the matrix unit fits the layouts around it (docs/accelerators.md has
# the bytes). Ones and zeros in the highest precision, where a float32 is the sum of three bfloat16 numbers, change no
# bit of finite numbers.
@swap_pairs.implementation("product", platforms=("tpu",), accepts=lambda x: x.dtype == jnp.float32)
def _swap_by_product(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    H = x.shape[-1]
    permutation = np.eye(H, dtype=np.float32)[np.arange(H) ^ 1]
    return jnp.einsum("...h,hk->...k", x, permutation, precision=jax.lax.Precision.HIGHEST)


swap_pairs.examples = [Example((float32(16, 12, 128),))]
