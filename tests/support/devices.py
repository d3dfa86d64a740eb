"""A process of its own that has several virtual devices of the CPU."""

import json
import os
import subprocess
import sys
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
