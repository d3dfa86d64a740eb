"""Compilers for devices that are not attached, in the versions that match the installed JAX, one requirement a line.

`make test-targets` installs them beside the environment: within it, JAX would look for their devices in every process.
"""

from __future__ import annotations

import re
from importlib.metadata import requires, version


def requirements() -> list[str]:
    """Requirements of the extras `plan-tpu` and `plan-cuda`, without the packages of those."""
    of_tpu = (re.match(r'(libtpu[^;\s]*).*extra == "tpu"', line) for line in requires("jax") or [])
    cuda = (f"{name}=={version('jax')}" for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"))
    return [*(match[1] for match in of_tpu if match), *cuda, "nvidia-cuda-nvcc>=13"]


if __name__ == "__main__":
    print("\n".join(requirements()))
