"""Quantised weights packed by the published rules, one number at a time, and what the packed arrays stand for.

The packing shares nothing with the package's own readers.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny import random_weights, tiny_config, tiny_tokenizer
from verax.checkpoint import Checkpoint

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pack_rows(codes, bits, order=None):
    """`[D, F]` to words `[D * bits / 32, F]`: number d in bits `bits * d` and up of its column."""
    per = 32 // bits
    words = np.zeros((len(codes) // per, codes.shape[1]), np.uint32)
    for word in range(len(words)):
        for i in range(per):
            words[word] |= codes[word * per + (order or range(per))[i]].astype(np.uint32) << np.uint32(bits * i)
    return words


def random_codes(rng, F, D, group, bits, symmetric):
    """Codes `[F, D]`, zero points and scales `[F, groups]`, with real spread."""
    codes = rng.integers(0, 2**bits, (F, D))
    groups = D // group
    zeros = np.full((F, groups), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (F, groups))
    scales = (0.3 / 2**bits * np.exp(0.5 * rng.standard_normal((F, groups)))).astype(np.float16)
    return codes, zeros, scales


def dequantized(codes, zeros, scales, g_idx):
    """Float64 weight `[F, D]`."""
    return (codes - zeros[:, g_idx]) * scales.astype(np.float64)[:, g_idx]


def gptq(rng, F, D, *, group=32, bits=4, symmetric=True, act_order=False, version=1, g_idx=True):
    """Arrays by the last part of their key, and the weight."""
    codes, zeros, scales = random_codes(rng, F, D, group, bits, symmetric)
    of_inputs = np.arange(D) // group
    if act_order:
        of_inputs = rng.permutation(of_inputs)
    arrays = {
        "qweight": pack_rows(codes.T, bits).view(np.int32),
        "qzeros": np.ascontiguousarray(pack_rows(zeros - (version == 1), bits).T).view(np.int32),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": of_inputs.astype(np.int32),
    }
    if not g_idx:
        del arrays["g_idx"]
    return arrays, dequantized(codes, zeros, scales, of_inputs)


def awq(rng, F, D, *, group=32):
    """Arrays by the last part of their key, and the weight."""
    codes, zeros, scales = random_codes(rng, F, D, group, 4, False)
    arrays = {
        "qweight": np.ascontiguousarray(pack_rows(codes, 4, AWQ_ORDER).T).view(np.int32),
        "qzeros": np.ascontiguousarray(pack_rows(zeros, 4, AWQ_ORDER).T).view(np.int32),
        "scales": np.ascontiguousarray(scales.T),
    }
    return arrays, dequantized(codes, zeros, scales, np.arange(D) // group)


def float8(rng, F, D, *, block=(128, 128), scale_dtype=np.float32, name="weight_scale_inv"):
    """Arrays by the last part of their key, and the weight. A block of None: the whole axis."""
    values = (40 * rng.standard_normal((F, D))).astype(ml_dtypes.float8_e4m3fn)
    rows, columns = (size or whole for size, whole in zip(block, (F, D), strict=True))
    grid = -(-F // rows), -(-D // columns)
    scales = (0.004 * np.exp(0.5 * rng.standard_normal(grid))).astype(scale_dtype)
    weight = np.empty((F, D))
    for f in range(F):
        for d in range(D):
            weight[f, d] = np.float64(values[f, d]) * np.float64(scales[f // rows, d // columns])
    return {"weight": values, name: scales}, weight


def mxfp4(rng, F, D):
    """Arrays by the last part of their key, and the weight."""
    codes = rng.integers(0, 16, (F, D))
    exponents = rng.integers(122, 126, (F, D // 32)).astype(np.uint8)
    values = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    weight = values * np.repeat(2.0 ** (exponents.astype(np.int32) - 127), 32, axis=1)
    return {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), "weight_scale": exponents}, weight


def open_packed(folder, arrays, scheme):
    """A checkpoint of one weight `up.weight`: arrays by the last part of their key, and its `quantization_config`."""
    stored = {f"up.{name}": array for name, array in arrays.items() if array is not None}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    return Checkpoint.open(folder)


def quantized_checkpoint(folder, pack, scheme):
    """A tiny model's folder, whose linear layers but `v_proj` are packed by a function; returns float32 arrays by key.

    Args:
        folder: folder of the checkpoint.
        pack: function of a generator and a shape to arrays by the last part of their key, and the weight.
        scheme: config.json's `quantization_config`.
    """
    config = tiny_config(num_hidden_layers=1, hidden_size=128, intermediate_size=192, head_dim=32)
    rng = np.random.default_rng(0)
    floats, stored = {}, {}
    for key, weight in random_weights(config).items():
        layer = key.removesuffix(".weight")
        if layer.endswith(LINEAR):
            arrays, exact = pack(rng, *weight.shape)
            stored.update({f"{layer}.{last}": array for last, array in arrays.items()})
            floats[key] = exact.astype(np.float32)
        else:
            stored[key] = floats[key] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    tiny_tokenizer(folder, config["vocab_size"])
    return floats
