"""Quantised weights of folders: GPTQ, AWQ, AutoRound, FP8 and MXFP4. `compressed_tensors` has that library's layouts.

A weight `X.weight` of shape `[F, D]` with a scale for a row or for a group of inputs is stored as

- **GPTQ** (Frantar et al., 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it: `X.qweight` int32
  `[D * bits / 32, F]`, output f of input d at bits `bits * d` and up of column f; `X.qzeros` int32
  `[groups, F * bits / 32]`, zero points side by side along F, in version 1 of the layout less one, in version 2
  (`checkpoint_format: gptq_v2`) unchanged; `X.scales` `[groups, F]`; and `X.g_idx` int32 `[D]`, the group of each
  input, which act-order (`desc_act`) shuffles. `W[f, d] = (code - zero[group of d, f]) * scales[group of d, f]`;
- **AWQ** (Lin et al., 2023, arXiv:2306.00978) in AutoAWQ's version `gemm`, 4 bits packed along F: `X.qweight` int32
  `[D, F / 8]`, bits 4i to 4i + 3 of word c hold output `8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]`; `X.qzeros` int32
  `[groups, F / 8]` in the same order; `X.scales` `[groups, F]`. The formula is GPTQ's;
- **AutoRound** (Cheng et al., 2023, arXiv:2309.05516), as GPTQ of either version, or as AWQ (`packing_format`);
- **FP8**, also float-quantized and mxfp8-quantized: `X.weight` float8_e4m3fn, to be multiplied by `X.weight_scale_inv`
  or `X.weight_scale`: `[F / rows, D / columns]`, both rounded up, for blocks of `weight_block_size` (128 x 128);
  `[F, 1]` for rows; of one element for the whole weight; or uint8 `[F, D / 32]`, powers of two with an offset of 127
  (E8M0). Inputs are not quantised here: products are more precise than where these checkpoints run in FP8. Scales of
  activations and caches are therefore not read;
- **mxfp4-pack-quantized** (OCP Microscaling Formats, version 1.0), floats E2M1, 32 of which share a power of two:
  `X.weight_packed` uint8 `[F, D / 2]`, with input 2i of a row in the low bits of byte i, and `X.weight_scale` uint8
  `[F, D / 32]`, exponents with an offset of 127. Twice an E2M1 is an integer of -12..12, so that the weight is held
  exactly as integers of 8 bits, in twice the memory of the file;
- **mxfp4** of gpt-oss: the same, of the experts of a layer: `X_blocks` uint8 `[E, F, D / 32, 16]` and `X_scales` uint8
  `[E, F, D / 32]`.

Sources: AutoGPTQ, `nn_modules/qlinear/qlinear_cuda_old.py`; ModelCloud/GPTQModel, `utils/model.py`,
`convert_gptq_v1_to_v2_format_module`; casper-hansen/AutoAWQ, `awq/modules/linear/gemm.py` and
`awq/utils/packing_utils.py`; intel/auto-round, `inference/backend.py`; DeepSeek-V3 (arXiv:2412.19437),
`inference/kernel.py`; transformers, `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from verax.checkpoint.formats.safetensors import TensorInfo
from verax.errors import CheckpointError
from verax.fields import Size, read_value
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight, parse_blocks
from verax.ops.quantized import BITS, GROUP_SIZES, Precision, QuantizedWeight

GROUPS = f"a scale for {', '.join(map(str, GROUP_SIZES))} inputs or a multiple of them, or one for a row"
"""Words for the groups that a weight may have."""

_PART_OF_STACK = re.compile(r"^(?:gate_up_proj|down_proj)_(blocks|scales)$")
"""Last part of a key of a stack's arrays, which begins with the stack's name."""

_from_integers = jax.jit(QuantizedWeight.from_integers, static_argnames=("bits", "group_size"))


class QuantizedEntry(NamedTuple):
    """A quantised weight of a file: its storage, and the conversion of its arrays."""

    where: object
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of the array of floats that it represents; `(E, F, D)` of a stack."""
    kind: str
    """Name of the quantisation, and what shares a scale."""
    convert: Callable[..., QuantizedWeight | BlockQuantizedWeight]
    """Function of the arrays, by the last part of their keys, to an exact copy of the weight."""
    held: Any = None
    """The weight with shapes in the place of arrays; None if the header does not determine them."""
    precision: Precision | None = None
    """Bits and groups of what is held, of a matrix whose header determines only these."""

    def read(self, read_raw: Callable[[str], np.ndarray]) -> QuantizedWeight | BlockQuantizedWeight:
        """Copy it out of its file, with the arrays that `read_raw` gives, without rounding."""
        try:
            names = {key: key.rpartition(".")[2] for key in self.keys}
            return self.convert(**{_PART_OF_STACK.sub(r"\1", name): read_raw(key) for key, name in names.items()})
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {self.keys[0]}: {error}") from error


def sharing(groups: int, size_in: int) -> str:
    """Name of what shares a scale: a row, or the number of inputs of a group."""
    return "rows" if groups == 1 else str(size_in // groups)


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in bytes `[R, n]`, the first in the low bits: uint8 `[R, 2 n]`."""
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Integers in words of 32 bits `[R, n]`, each stored plus half of their range: int8 `[R, 32 n / bits]`.

    `words`: integers side by side in the last axis, the first in the lowest bits. `bits`: 4 or 8.
    """
    stored = np.ascontiguousarray(words).view(np.uint8)
    codes = _nibbles(stored) if bits == 4 else stored
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def fits(size: int, size_in: int, bits: int) -> bool:
    """True if a `QuantizedWeight` can hold scales of `size` inputs each, of `size_in`."""
    return bool(_groups(size, size_in)) or (bits == 8 and size >= size_in)


def fitting_group(size: int, size_in: int, bits: int) -> int | None:
    """Group size for scales of `size` inputs each, where `fits`: None for a whole row.

    Groups of another size become several of a smaller one, with the same scale.
    """
    return None if bits == 8 and size >= size_in else max(_groups(size, size_in))


def _groups(size: int, size_in: int) -> list[int]:
    return [group for group in GROUP_SIZES if size_in % group == 0 and (size % group == 0 or size >= size_in)]


def _spread(of_groups: np.ndarray, size: int, size_in: int, group: int | None) -> np.ndarray:
    """Numbers of groups of `size` inputs, `[R, n]`, for each group of `group` inputs."""
    if group is None or group == size:
        return of_groups
    return of_groups[:, np.arange(0, size_in, group) // size]


def _fitting_scales(scales: np.ndarray, group: int | None) -> np.ndarray:
    """Scales of groups as float16 if that changes none, which halves the bytes to read; else as float32."""
    scales = np.asarray(scales, np.float32)
    if group is None:
        return scales
    with np.errstate(over="ignore"):
        halved = scales.astype(np.float16)
    return halved if np.array_equal(halved, scales) else scales


def order_of(g_idx: np.ndarray | None, groups: int) -> np.ndarray | None:
    """Inputs by group, from the group of each; None if they are in this order already."""
    # Zeros and minus ones: written without act-order, by a library that left the array as it was allocated.
    if g_idx is None or groups == 1 or not (g_idx.any() and (g_idx + 1).any()):
        return None
    expected = np.arange(len(g_idx)) // (len(g_idx) // groups)
    if np.array_equal(g_idx, expected):
        return None
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], expected):
        raise ValueError(f"g_idx does not give each of {groups} groups the same number of inputs")
    return order


def unfitting(tensors: Mapping[str, TensorInfo], keys: Sequence[str], supported: str, where: object) -> CheckpointError:
    """The error of a weight whose arrays do not go together, or not in a way that is supported."""
    arrays = ", ".join(f"{key} of dtype {tensors[key].dtype} and shape {list(tensors[key].shape)}" for key in keys)
    return CheckpointError(f"{where}: {arrays}; supported are {supported}")


def lay_out(
    integers: np.ndarray,
    scales: np.ndarray,
    bits: int,
    size: int,
    *,
    zeros: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> QuantizedWeight:
    """The weight of these integers, exactly.

    Args:
        integers: int8 `[F, D]`, of -8..7 with 4 bits.
        scales: `[F, n]`, one for `size` inputs each.
        zeros: int8 `[F, n]`, integers that stand for 0; where all are 0 the weight is symmetric.
        order: input that each column multiplies; None if it is the column's own.
    """
    size_in = integers.shape[1]
    group = fitting_group(size, size_in, bits)
    parts = [_fitting_scales(_spread(scales, size, size_in, group), group)]
    if zeros is not None and zeros.any():
        parts.append(_spread(zeros, size, size_in, group))
    per_group, *rest = map(jnp.array, parts)
    return _from_integers(
        jnp.array(integers),
        per_group,
        bits=bits,
        group_size=group,
        zeros=rest[0] if rest else None,
        order=None if order is None else jnp.array(order),
    )


_AWQ, _AWQ_BITS = "awq", 4
_LAYOUTS = ("gptq", "gptq_v2")
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""Ones in every code of a word."""

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of eight outputs in its word of AWQ."""


def _from_words(
    bits: int,
    layout: str,
    *,
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    g_idx: np.ndarray | None = None,
) -> QuantizedWeight:
    if layout == _AWQ:
        integers, zeros = _in_order(qweight), _in_order(qzeros)
    else:
        words = np.ascontiguousarray(qzeros).view(np.uint32)
        if layout == "gptq":
            words = words + _ONES[bits]  # with a carry between codes: the inverse of how they were taken off
        integers, zeros = unpack(qweight.T, bits), unpack(words, bits).T
    order = order_of(g_idx, len(scales))
    integers = integers if order is None else integers[:, order]
    return lay_out(integers, scales.T, bits, integers.shape[1] // len(scales), zeros=zeros, order=order)


def _in_order(words: np.ndarray) -> np.ndarray:
    """Integers `[F, n]` of AWQ's words `[n, F / 8]`."""
    packed = unpack(words, _AWQ_BITS)
    return packed.reshape(len(packed), -1, len(_PLACES))[..., _PLACES].reshape(packed.shape).T


def find_gptq(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """GPTQ weights among a checkpoint's tensors, by their plain key."""
    layout = read_value(config, "checkpoint_format", str, None) or read_value(config, "format", str, "gptq")
    if layout not in _LAYOUTS:
        raise CheckpointError(f"{where}: GPTQ weights in the layout {layout!r} are not supported: gptq and gptq_v2 are")
    if (bits := read_value(config, "bits", int, 4)) not in BITS:
        raise CheckpointError(f"{where}: GPTQ weights of {bits} bits are not supported: 4 and 8 are")
    if (rotation := config.get("rotation")) is not None:
        raise CheckpointError(f"{where}: rotation: {rotation!r}, of activations, is not supported; a model without is")
    weights = _find(tensors, layout, where, config)
    for key, entry in weights.items():
        needed = read_value(config, "desc_act", bool, False) and tensors[entry.keys[2]].shape[0] > 1
        if needed and (g_idx := key.removesuffix("weight") + "g_idx") not in tensors:
            raise CheckpointError(f"{where}: {g_idx} missing, which has the groups of inputs with desc_act")
    return weights


def find_awq(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """AWQ weights among a checkpoint's tensors, by their plain key."""
    version = read_value(config, "version", str, None) or read_value(config, "format", str, "gemm")
    if version.lower() != "gemm":
        raise CheckpointError(f"{where}: AWQ weights in the version {version!r} are not supported: gemm is")
    bits = read_value(config, "bits", int, None) or read_value(config, "w_bit", int, _AWQ_BITS)
    if bits != _AWQ_BITS:
        raise CheckpointError(f"{where}: AWQ weights of {bits} bits are not supported: {_AWQ_BITS} are")
    return _find(tensors, _AWQ, where, config)


_AUTO_ROUND = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": _AWQ,
}
"""Layouts by AutoRound's `packing_format`."""


def find_auto_round(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """Weights of Intel's AutoRound among a checkpoint's tensors, by their plain key."""
    layout = _AUTO_ROUND.get(packing := read_value(config, "packing_format", str, "auto_round:auto_gptq"))
    if layout is None:
        names = ", ".join(_AUTO_ROUND)
        raise CheckpointError(f"{where}: packing_format {packing!r} of AutoRound is not supported: {names} are")
    kind, bits = read_value(config, "data_type", str, "int"), read_value(config, "act_bits", int, 16)
    if kind != "int" or bits < 16 or config.get("rotation_config"):
        raise CheckpointError(
            f"{where}: AutoRound's {kind} weights with inputs of {bits} bits, or rotated, are not supported"
        )
    return _find(tensors, layout, where, config)


def _find(
    tensors: Mapping[str, TensorInfo], layout: str, where: object, config: Mapping[str, Any]
) -> dict[str, QuantizedEntry]:
    sizes = {read_value(config, name, int, 0) for name in ("group_size", "q_group_size")}
    stems = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    return {f"{stem}.weight": _describe_words(tensors, stem, layout, where, sizes) for stem in stems}


def divides(groups: int, size_in: int, sizes: Iterable[int]) -> bool:
    """True if that many groups are of one size each, as far as a configuration's group sizes say."""
    shorter = (size > 0 and size_in % size and groups == -(-size_in // size) for size in sizes)  # the last group
    return size_in % groups == 0 and (groups == 1 or not any(shorter))


def _describe_words(
    tensors: Mapping[str, TensorInfo], stem: str, layout: str, where: object, sizes: Iterable[int]
) -> QuantizedEntry:
    """The weight of a module, from the dtypes and shapes of its arrays."""
    qweight, qzeros, scales = keys = f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"
    if missing := [key for key in keys if key not in tensors]:
        raise CheckpointError(f"{where}: {qweight} has no {' and no '.join(missing)} with it")
    words = all(tensors[key].dtype == np.int32 for key in (qweight, qzeros))
    if not words or tensors[scales].dtype.kind in "iub" or any(len(tensors[key].shape) != 2 for key in keys):
        raise unfitting(tensors, keys, "matrices, the first two of int32 and the last of floats", where)
    shape, zeros, (groups, F) = (tensors[key].shape for key in keys)
    if layout != _AWQ and f"{stem}.g_idx" in tensors:
        keys = (*keys, f"{stem}.g_idx")
    precisions = (_AWQ_BITS,) if layout == _AWQ else BITS
    for bits in precisions:  # by the shapes: single layers may have other bits than the rest
        per_word = 32 // bits
        D = shape[0] if layout == _AWQ else shape[0] * per_word
        packed = F // per_word if F % per_word == 0 else 0
        whole = shape[1] == (packed if layout == _AWQ else F) and zeros == (groups, packed)
        whole = whole and packed > 0 and groups > 0 and divides(groups, D, sizes)
        if whole and all(tensors[key].shape == (D,) for key in keys[3:]) and fits(D // groups, D, bits):
            kind = f"{'AWQ' if layout == _AWQ else 'GPTQ'} int{bits} by {sharing(groups, D)}"
            precision = Precision(bits, fitting_group(D // groups, D, bits))
            convert = partial(_from_words, bits, layout)
            return QuantizedEntry(where, keys, (F, D), kind, convert, precision=precision)
    raise unfitting(tensors, keys, f"{' or '.join(map(str, precisions))} bits with {GROUPS}", where)


_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_NAN = 0x7F
"""Bits of a NaN without its sign. The type has no infinity."""

_SCALES = ("weight_scale_inv", "weight_scale")


def _from_float8(
    shape: tuple[int, int], block: tuple[int, int], halve: bool, *, weight: np.ndarray, **scale: Any
) -> QuantizedWeight:
    if (weight.view(np.uint8) & _NAN == _NAN).any():
        raise ValueError("it has values that are not numbers")
    (F, D), (rows, columns) = shape, block
    scales = next(iter(scale.values()), np.ones(1, np.float32))
    if scales.dtype == np.uint8:
        scales = _powers_of_two(scales)
    scales = np.asarray(scales, np.float32).reshape(-(-F // rows), -(-D // columns))
    group = fitting_group(columns, D, 8)
    scales = _spread(scales[np.arange(F) // rows], columns, D, group)
    scales = _fitting_scales(scales, group) if halve else np.asarray(scales, np.float32)
    return QuantizedWeight(jnp.array(weight), jnp.array(scales), F, D, group, 8)


_NAN_EXPONENT = 255
"""Exponent that stands for NaN."""


def _powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Numbers of type E8M0 in float32: uint8 exponents with an offset of 127."""
    if (exponents == _NAN_EXPONENT).any():
        raise ValueError("its scales have values that are not numbers")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def describe_float8(
    tensors: Mapping[str, TensorInfo],
    keys: tuple[str, ...],
    block: tuple[int, int] | None,
    where: object,
    halve: bool = True,
) -> QuantizedEntry:
    """The weight with these keys, of values and perhaps of scales.

    `halve`: True to hold scales of groups as float16 where that changes none, which their values decide.
    """
    values = tensors[keys[0]]
    scales = tensors[keys[1]] if len(keys) > 1 else TensorInfo(np.dtype(np.float32), (1,), 0, 0)
    if values.dtype == _FLOAT8 and len(values.shape) == 2:
        F, D = values.shape
        grid = scales.shape if len(scales.shape) == 2 else (*scales.shape, 1, 1)[:2]
        options = [(F, D)] if grid == (1, 1) else [(1, D // grid[1])] if grid[0] == F and grid[1] else []
        for rows, columns in ([] if block is None else [block]) + options:
            whole = grid == (-(-F // rows), -(-D // columns)) if rows and columns else False
            if whole and fits(columns, D, 8):
                columns = min(columns, D)
                shared = "rows" if rows == 1 else "tensors"
                if columns < D:
                    shared = f"{f'{rows}x' if rows > 1 else ''}{columns}"
                convert = partial(_from_float8, (F, D), (rows, columns), halve)
                group = fitting_group(columns, D, 8)
                held = None if halve and group is not None else _shapes((F, D), group, _FLOAT8)
                return QuantizedEntry(where, keys, (F, D), f"{_FLOAT8} by {shared}", convert, held, Precision(8, group))
    raise unfitting(tensors, keys, f"8-bit floats (float8_e4m3fn) with {GROUPS}, shared by rows or not", where)


def find_float8(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """The quantised weights among a checkpoint's tensors, by their plain key."""
    block = read_value(config, "weight_block_size", tuple[Size, Size], None)
    weights: dict[str, QuantizedEntry] = {}
    for key, info in tensors.items():
        stem, _, last = key.rpartition(".")
        if last == "weight" and info.dtype.itemsize == 1:
            scales = [f"{stem}.{name}" for name in _SCALES]
            present = [name for name in scales if name in tensors]
            if not present:
                raise CheckpointError(f"{where}: {key} has no {' or '.join(scales)} with it")
            weights[key] = describe_float8(tensors, (key, present[0]), block, where)
    return weights


def _shapes(shape: tuple[int, int], group: int | None, dtype: DTypeLike) -> QuantizedWeight:
    """A weight of 8 bits with float32 scales, with shapes in the place of arrays."""
    values = jax.ShapeDtypeStruct(shape, dtype)
    scales = jax.ShapeDtypeStruct((shape[0], 1 if group is None else shape[1] // group), jnp.float32)
    return QuantizedWeight(values, scales, *shape, group, 8)


def _from_int8(rounds_inputs: bool, *, weight: np.ndarray, weight_scale: np.ndarray) -> QuantizedWeight:
    F, D = weight.shape
    scales = np.broadcast_to(weight_scale.astype(np.float32).reshape(-1, 1), (F, 1))
    return QuantizedWeight(jnp.array(weight), jnp.array(scales), F, D, None, 8, rounds_inputs=rounds_inputs)


def describe_scaled(
    tensors: Mapping[str, TensorInfo],
    keys: tuple[str, ...],
    block: tuple[int, int],
    where: object,
    *,
    rounds_inputs: bool = False,
) -> QuantizedEntry:
    """The matrix of 8-bit floats or integers with these keys, of values and perhaps of scales, without a configuration.

    Its scales are held as float32, so that the header determines what is held. `rounds_inputs`: of integers, as in
    `QuantizedWeight`.
    """
    F, D = tensors[keys[0]].shape
    if tensors[keys[0]].dtype == np.int8:
        if math.prod(tensors[keys[1]].shape) not in (1, F):
            raise unfitting(tensors, keys, "8-bit integers with a scale for a row or for all", where)
        held = replace(_shapes((F, D), None, jnp.int8), rounds_inputs=rounds_inputs)
        return QuantizedEntry(where, keys, (F, D), "int8 by rows", partial(_from_int8, rounds_inputs), held)
    return describe_float8(tensors, keys, block, where, halve=False)


def find_modelopt(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """FP8 weights of NVIDIA's ModelOpt among a checkpoint's tensors, by their plain key."""
    algorithm = read_value(config, "quant_algo", str, None)  # None where the cache alone is quantised
    if algorithm not in (None, "FP8"):
        raise CheckpointError(f"{where}: quant_algo {algorithm!r} of ModelOpt is not supported: FP8 is")
    return find_float8(tensors, {}, read, where)


_MXFP4_GROUP = 32
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number that each code stands for."""


def _from_mxfp4(*, weight_packed: np.ndarray, weight_scale: np.ndarray) -> QuantizedWeight:
    return lay_out(_DOUBLED[_nibbles(weight_packed)], _powers_of_two(weight_scale) / 2, 8, _MXFP4_GROUP)


def describe_mxfp4(tensors: Mapping[str, TensorInfo], keys: tuple[str, str], where: object) -> QuantizedEntry:
    """The weight with these keys, of values and of scales."""
    values, scales = (tensors[key] for key in keys)
    if len(values.shape) == 2:
        F, D = values.shape[0], 2 * values.shape[1]
        if scales.dtype == np.uint8 and scales.shape == (F, D // _MXFP4_GROUP) and fits(_MXFP4_GROUP, D, 8):
            precision = Precision(8, _MXFP4_GROUP)
            return QuantizedEntry(where, keys, (F, D), "MXFP4", _from_mxfp4, precision=precision)
    raise unfitting(tensors, keys, f"MXFP4 with an exponent (uint8) for {_MXFP4_GROUP} inputs", where)


GGML_KINDS = ("Q8_0", "Q4_0", "MXFP4")
"""Types of GGUF files that `from_ggml` holds exactly."""


def from_ggml(kind: str, rows: np.ndarray) -> QuantizedWeight:
    """Weight of rows of blocks of a type out of `GGML_KINDS`, `uint8 [F, bytes]`, as integers with a scale for 32."""
    if kind != "MXFP4":
        codes, scales, *_ = parse_blocks(kind, rows.reshape(len(rows), -1, BLOCK_KINDS[kind].block_bytes))
        bits = 8 if kind == "Q8_0" else 4
        integers = codes.astype(np.int16) - (1 << (bits - 1))
        return lay_out(integers.astype(np.int8).reshape(len(rows), -1), scales[..., 0], bits, 32)
    blocks = rows.reshape(len(rows), -1, 17)  # an exponent, then the lower and the upper halves of 16 bytes
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return lay_out(_DOUBLED[codes].reshape(len(rows), -1), _powers_of_two(blocks[..., 0]) / 2, 8, _MXFP4_GROUP)


def _from_mxfp4_stack(*, blocks: np.ndarray, scales: np.ndarray) -> QuantizedWeight:
    """Matrices in a stack `[E, F, D]`; one at a time, since parts of the codes take several times their bytes."""
    E, F, groups, half = blocks.shape
    values = np.empty((E, F, groups * half * 2), np.int8)
    for i, matrix in enumerate(blocks.reshape(E, F, -1)):
        values[i] = _DOUBLED[_nibbles(matrix)]
    factors = _fitting_scales(_powers_of_two(scales) / 2, _MXFP4_GROUP)
    return QuantizedWeight(values, factors, F, values.shape[2], _MXFP4_GROUP, 8)


def find_mxfp4(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: object, where: object
) -> dict[str, QuantizedEntry]:
    """The stacks of experts among a checkpoint's tensors, by their plain key."""
    weights: dict[str, QuantizedEntry] = {}
    for key, info in tensors.items():
        stem = key.removesuffix("_blocks")
        if stem == key:
            continue
        if (scales := f"{stem}_scales") not in tensors:
            raise CheckpointError(f"{where}: {key} has no {scales} with it")
        (*outer, half), of_scales, half_group = info.shape, tensors[scales], _MXFP4_GROUP // 2
        bytes_only = info.dtype == of_scales.dtype == np.uint8
        if not bytes_only or len(outer) != 3 or half != half_group or of_scales.shape != tuple(outer):
            raise unfitting(tensors, (key, scales), f"blocks [E, F, D / 32, {half_group}] and scales of uint8", where)
        E, F, groups = outer
        weights[stem] = QuantizedEntry(where, (key, scales), (E, F, groups * _MXFP4_GROUP), "MXFP4", _from_mxfp4_stack)
    return weights
