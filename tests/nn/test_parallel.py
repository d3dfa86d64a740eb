"""Blocks in one stack: which of their weights are divided. tests/video/test_mesh.py compares clips with such blocks."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from verax.nn import LayerNorm, Linear
from verax.nn.parallel import ShardedBlocks

LAYERS = 3


class Block(nnx.Module):
    def __init__(self, size, inner, key):
        self.norm = LayerNorm(size, eps=1e-6, dtype=jnp.float32)
        self.ffn = Linear(size, inner, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(key))


def blocks(size, inner):
    return [Block(size, inner, i) for i in range(LAYERS)]


@pytest.mark.parametrize(("inner", "axis"), [(16, 1), (6, 2), (5, 2)])
def test_a_matrix_is_divided_along_the_first_axis_that_divides_over_all_devices(inner, axis):
    stack = nnx.eval_shape(lambda: ShardedBlocks(blocks(8, inner), AbstractMesh((2, 4), ("rows", "columns"))))
    found = stack.divisions
    assert list(found) == ["stack.ffn.weight"]
    assert found["stack.ffn.weight"].spec == PartitionSpec(*[None] * axis, ("rows", "columns"))


def test_what_no_axis_divides_is_whole():
    stack = nnx.eval_shape(lambda: ShardedBlocks(blocks(6, 5), AbstractMesh((4,), ("devices",))))
    assert stack.divisions == {}
