"""Blocks in one stack: equal to the blocks of the list, and which of their weights are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from verax._compat import make_mesh
from verax.nn import LayerNorm, Linear
from verax.nn.parallel import ShardedBlocks, scan_blocks

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


def test_a_stack_makes_the_results_of_its_blocks_with_the_batch_before_the_block():
    def step(x, block, scale):
        y = block.ffn(block.norm(x)) * scale
        return x + y, y

    rng = np.random.default_rng(0)
    x, scales = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 8), (2, LAYERS, 1)))
    listed = blocks(8, 8)
    carry, results = scan_blocks(step, listed, x, tuple(scales.swapaxes(0, 1)))

    mesh = make_mesh((1,), ("devices",), jax.local_devices()[:1])
    stack = ShardedBlocks(listed, mesh)
    whole = PartitionSpec()
    run = jax.shard_map(
        lambda x, scales: scan_blocks(step, stack, x, scales),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    stacked_carry, stacked_results = jax.jit(run)(x, scales)
    np.testing.assert_allclose(stacked_carry, carry, rtol=1e-5)
    assert stacked_results.shape == (2, LAYERS, 8)
    np.testing.assert_allclose(stacked_results, np.stack(results, axis=1), rtol=1e-5, atol=1e-6)
