"""Processes with several virtual devices of the CPU, and the collectives of a program."""

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
    compiled = next(iter(program._compiled.values()))
    return Counter(
        re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)\(", compiled.as_text())
    )
