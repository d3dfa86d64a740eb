"""Decode step of the gated delta rule on an NVIDIA GPU: passes over the states, by XLA and by the kernel."""

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tests.targets.test_targets import skip_without_compiler
from verax import ops
from verax._compat import no_compilation_cache
from verax.plan.compiled.topology import compiler_of, topology_mesh
from verax.plan.devices import find_device

ROWS, HEADS, SIZE = 64, 16, 128

INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)", re.MULTILINE)
"""Label, type, name and operands of an instruction."""

MOVES_NOTHING = ("parameter", "bitcast", "get-tuple-element", "tuple")


class Passes(NamedTuple):
    """Number of readings and writings of all states."""

    reads: int
    writes: int


def step(states, q, k, v, g, beta):
    options = {"initial_state": states, "output_final_state": True, "use_qk_l2norm": True}
    out, states = ops.gated_delta_rule(q, k, v, g, beta, **options)
    return states, out


def passes(implementation):
    """Passes over the donated states of a decode step on an H100."""
    skip_without_compiler("h100")
    device = find_device("h100")
    compiler = compiler_of(device)
    state, key, gate = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((ROWS, HEADS, SIZE, SIZE), (ROWS, 1, HEADS, SIZE), (ROWS, 1, HEADS))
    )
    whole = NamedSharding(topology_mesh(device, 1), PartitionSpec())
    with (
        ops.use_target(device.platform, device.kind, device.memory),
        ops.use_implementations(delta_recurrence=implementation),
    ):
        lowered = jax.jit(step, in_shardings=whole, donate_argnums=0).lower(state, key, key, key, gate, gate)
    with no_compilation_cache():
        text = lowered.compile(compiler_options=dict(compiler.options)).as_text()
    return count_passes(text, state.size)


def count_passes(text, size):
    """Instructions of a program's entry that take, and that result in, an array of so many elements."""
    _, _, entry = text.partition("\nENTRY ")
    found, reads, writes = set(), 0, 0
    for label, result, name, rest in INSTRUCTION.findall(entry):
        is_large = any(math.prod(map(int, shape.split(","))) == size for shape in re.findall(r"\[([\d,]+)\]", result))
        if is_large:
            found.add(label)
        if name not in MOVES_NOTHING:
            reads += not found.isdisjoint(re.findall(r"%([\w.\-]+)", rest))
            writes += is_large
    return Passes(reads, writes)


def test_xla_reads_the_states_for_the_products_and_again_for_the_update():
    assert passes("step") == Passes(2, 1)


def test_the_kernel_reads_them_once_and_writes_them_in_place():
    assert passes("triton") == Passes(1, 1)
