"""The sampler compiled for an NVIDIA GPU: how often a step reads and writes all scores."""

import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.sampling import sampling_shapes
from tests.targets.test_targets import skip_without_compiler
from tests.targets.topology import compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.plan.devices import find_device

ROWS, VOCAB, CONTEXT = 16, 151936, 2048
"""Sequences, tokens and context of Qwen3-0.6B's decode step in `cases.py`."""

SCORES = f"f32[{ROWS},{VOCAB}]"


@pytest.fixture(scope="module")
def sampler():
    """Instructions of each computation of `ops.sampling.sample`, compiled for an H100; `""` is the entry."""
    skip_without_compiler("h100")
    device = find_device("h100")
    on_device = NamedSharding(topology_mesh(device, 1), PartitionSpec())
    with ops.use_target(device.platform, device.kind, device.memory), no_compilation_cache():
        jitted = jax.jit(ops.sampling.sample.__call__, in_shardings=on_device)
        lowered = jitted.lower(*sampling_shapes(ROWS, VOCAB, CONTEXT))
        return computations(lowered.compile(compiler_options=dict(compiler_of(device).options)).as_text())


def computations(text):
    """Lines of each computation by name."""
    result = {}
    for line in text.splitlines():
        if begin := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
            lines = result["" if begin[1] else begin[2]] = []
        elif result:
            lines.append(line)
    return result


def branches(lines):
    """Names of the two computations of the only choice among some lines: where its condition holds, and where not."""
    (choice,) = (line for line in lines if " conditional(" in line)
    return [re.search(rf"{side}_computation=%([\w.\-]+)", choice)[1] for side in ("true", "false")]


def passes(lines):
    """Kernels that read all scores, and those that write them, among some lines."""
    held = {label(line) for line in lines if SCORES in line.partition(" = ")[2].partition(" ")[0]}
    kernels = [line for line in lines if re.search(r" (fusion|copy|custom-call)\(", line)]
    read = [line for line in kernels if not held.isdisjoint(re.findall(r"%([\w.\-]+)", line.partition("(")[2]))]
    return len(read), len([line for line in kernels if label(line) in held])


def label(line):
    return re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)[1]


def test_a_greedy_step_reads_the_scores_once_and_copies_none(sampler):
    _, plain = branches(sampler[""])
    drawn, greedy = branches(sampler[plain])
    assert [passes(sampler[name]) for name in ("", plain, greedy)] == [(0, 0), (1, 0), (0, 0)]
    assert passes(sampler[drawn]) != (0, 0)


def test_a_draw_without_truncation_writes_the_scores_once(sampler):
    """The maximum reads them, and the differences from it."""
    _, plain = branches(sampler[""])
    drawn, _ = branches(sampler[plain])
    assert passes(sampler[drawn]) == (2, 1)
    _, all_kept = branches(sampler[drawn])
    assert passes(sampler[all_kept]) == (2, 0)  # sums of weights, and those around the token
