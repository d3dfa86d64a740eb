"""Products of weights compiled for TPUs: XLA widens 8-bit integers with a scale for each row without a kernel."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.targets.test_targets import skip_without_compiler
from tests.targets.topology import topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.plan.devices import find_device

SIZE_IN, SIZE_OUT = 4096, 12288


def compiled_product(rows, dtype):
    """`ops.linear` of a weight of Qwen3-8B's feed-forward layer, compiled for a TPU."""
    weight = jax.ShapeDtypeStruct((SIZE_OUT, SIZE_IN), jnp.bfloat16)
    if dtype == "int8":
        weight = jax.eval_shape(lambda dense: ops.quantize(dense, 8), weight)
    device = find_device("v5e")
    arguments = jax.ShapeDtypeStruct((rows, SIZE_IN), jnp.float32), weight
    on_device = NamedSharding(topology_mesh(device, 1), PartitionSpec())
    with ops.use_target(device.platform, device.kind, device.memory), no_compilation_cache():
        return jax.jit(ops.linear.__call__, in_shardings=on_device).lower(*arguments).compile()


def written(program):
    """Element types of arrays of the weight's shape that lie in memory, its own among them."""
    _, _, entry = program.as_text().partition("\nENTRY ")
    return set(re.findall(rf"(\w+)\[{SIZE_OUT},{SIZE_IN}\]", entry))


@pytest.mark.parametrize("rows", [1, 16, 512])
def test_int8_weights_are_widened_within_the_product(rows):
    skip_without_compiler("v5e")
    program = compiled_product(rows, "int8")
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert written(program) == {"s8"}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_single_row_is_multiplied_in_the_matrix_unit(dtype):
    skip_without_compiler("v5e")
    assert "convolution(" in compiled_product(1, dtype).as_text()
    with ops.use_implementations(linear="reference"):
        assert "convolution(" not in compiled_product(1, "bfloat16").as_text()
