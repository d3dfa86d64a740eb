"""Processes with several virtual devices of the CPU, the collectives of a program, its equations."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on_devices(count, module, *arguments):
    """Value that a module, run as a program, prints as JSON in its last line.

    Args:
        count: number of devices.
        module: its name.
        arguments: arguments of the program.
    """
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def collectives(program):
    """Number of each kind of collective in the first program that a `video.programs.Program` has compiled."""
    compiled, _ = next(iter(program._compiled.values()))
    return Counter(
        re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)\(", compiled.as_text())
    )


def primitives(jaxpr):
    """Names of a traced program's equations in order, with a called program's in the place of its call."""
    for equation in jaxpr.eqns:
        called = [value for value in equation.params.values() if hasattr(value, "eqns")]
        if not called:
            yield equation.primitive.name
        for program in called:
            yield from primitives(program)
