"""Decode step of an engine with a delta layer: passes over the layer's states, by XLA and by the kernels."""

import math
import re
from typing import NamedTuple

import pytest

from tests.targets.compile import programs_of
from tests.targets.test_targets import skip_without_compiler
from tests.targets.topology import compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.plan.devices import find_device

STATES = 16 * 16 * 128 * 128
"""Numbers of the states of all slots, and of all rows: 16 sequences, 16 value heads of 128."""

DELTA_LAYERS, DEPTH = 3, 4

INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)", re.MULTILINE)
"""Label, type, name and operands of an instruction."""

MOVES_NOTHING = ("parameter", "bitcast", "get-tuple-element", "tuple")


class Passes(NamedTuple):
    """Arrays of all states that instructions take, and that they result in."""

    reads: int
    writes: int


def passes(name, implementation):
    """Passes over the states of all delta layers, in the engine's decode step of 16 sequences."""
    skip_without_compiler(name)
    device = find_device(name)
    sizes = {"max_num_seqs": 16, "max_model_len": 2048}
    with (
        ops.use_target(device.platform, device.kind, device.memory),
        ops.use_implementations(delta_slot_recurrence=implementation),
    ):
        decode, _ = programs_of("hybrid", device, topology_mesh(device, 1), depth=DEPTH, **sizes)
        lowered = decode.lower()
    with no_compilation_cache():
        return count_passes(lowered.compile(compiler_options=dict(compiler_of(device).options)).as_text(), STATES)


def count_passes(text, size):
    """Arrays of `size` float32 numbers that the instructions of a program's entry take, and that they result in."""
    _, _, entry = text.partition("\nENTRY ")
    states, reads, writes = set(), 0, 0
    for label, result, name, rest in INSTRUCTION.findall(entry):
        large = sum(math.prod(map(int, shape.split(","))) == size for shape in re.findall(r"f32\[([\d,]+)\]", result))
        if large:
            states.add(label)
        if name not in MOVES_NOTHING:
            reads += len(states.intersection(re.findall(r"%([\w.\-]+)", rest)))
            writes += large
    return Passes(reads, writes)


def test_xla_gathers_the_states_and_reads_them_twice_the_second_time_to_scatter_them():
    """The scatter takes the states of all slots too, which it writes in place."""
    assert passes("h100", "reference") == Passes(4 * DELTA_LAYERS, 2 * DELTA_LAYERS)


@pytest.mark.parametrize(("device", "kernel"), [("h100", "triton"), ("v5e", "pallas")])
def test_a_kernel_reads_the_states_in_their_slots_once_and_writes_them_there(device, kernel):
    assert passes(device, kernel) == Passes(DELTA_LAYERS, DELTA_LAYERS)
