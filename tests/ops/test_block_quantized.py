"""Block formats of GGUF files: dequantised bit for bit as the gguf package does it, and multiplied as floats are."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gguf import random_blocks
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.block_quantized import BLOCK_KINDS

KINDS = list(BLOCK_KINDS)
EXTREME = np.float16([0, 6e-8, 3e-5, -0.3, 1.7, 65504, -65504])
"""Zero, float16's smallest, one without its leading bit, ordinary ones, the largest."""


def reference(kind, blocks):
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def sizes(kind):
    """Rows that fill no register of 16, inputs that fill no unit of 64 where the blocks allow it."""
    return (37, 768) if BLOCK_KINDS[kind].super_blocks else (37, 96)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", [None, EXTREME], ids=["gaussian", "extreme"])
def test_every_weight_has_the_bits_of_the_gguf_package(kind, scales):
    blocks = random_blocks(kind, *sizes(kind), scales=scales)
    weight = ops.BlockQuantizedWeight.from_blocks(kind, blocks)
    expected = reference(kind, blocks)
    assert weight.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(weight.dequantize()).view(np.uint32), expected.view(np.uint32))
    chosen = jnp.asarray([[3, 0], [36, 3]])
    rows = np.asarray(jax.jit(lambda w: w.rows(chosen))(weight))
    np.testing.assert_array_equal(rows.view(np.uint32), expected[np.asarray(chosen)].view(np.uint32))


def test_rows_that_are_laid_out_in_turns_equal_one_turn(monkeypatch):
    blocks = random_blocks("Q6_K", 50, 512)
    whole = ops.BlockQuantizedWeight.from_blocks("Q6_K", blocks).words
    monkeypatch.setattr("verax.ops.block_quantized.LAID_OUT_AT_ONCE", 16 * 512)
    np.testing.assert_array_equal(ops.BlockQuantizedWeight.from_blocks("Q6_K", blocks).words, whole)


def test_a_weight_takes_the_memory_of_the_file_or_little_more():
    for kind, bits in {"Q4_0": 4.5, "Q5_0": 5.5, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625}.items():
        assert ops.BlockQuantizedWeight.from_blocks(kind, random_blocks(kind, 32, 512)).nbytes == 32 * 512 * bits / 8


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_agree_with_the_reference(kind):
    rows, size_in = sizes(kind)
    weight = ops.BlockQuantizedWeight.from_blocks(kind, random_blocks(kind, rows, size_in))
    rng = np.random.default_rng(1)
    x, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((200, size_in), (rows,)))
    assert ops.linear.select(x, weight, bias).name == "dequantized"
    y, expected = jax.jit(ops.linear)(x, weight, bias), ops.linear.reference(x, weight, bias)
    # The weights are rounded to bfloat16: each product by up to 2^-9.
    size = np.abs(np.asarray(x)) @ np.abs(np.asarray(weight.dequantize())).T
    assert np.all(np.abs(y - expected) <= 2**-8 * size)


def test_other_kinds_and_rows_of_parts_of_blocks_are_refused():
    with pytest.raises(InvalidParameterError, match=r"kind: expected one of Q4_0, .*got 'Q2_K'"):
        ops.BlockQuantizedWeight.from_blocks("Q2_K", np.zeros((1, 84), np.uint8))
    with pytest.raises(InvalidParameterError, match="rows: 100 bytes are not whole Q4_K blocks of 144"):
        ops.BlockQuantizedWeight.from_blocks("Q4_K", np.zeros((1, 100), np.uint8))
