"""Compilers for devices that are not attached, in the versions that match the installed JAX, one requirement a line.

`make test-targets` installs them outside of the environment, where JAX would look for their devices in each process.
"""

from __future__ import annotations

import re
from importlib.metadata import requires, version


def requirements() -> list[str]:
    """Requirements of the extras `plan-tpu` and `plan-cuda`, without their own requirements."""
    of_tpu = (re.match(r'(libtpu[^;\s]*).*extra == "tpu"', line) for line in requires("jax") or [])
    cuda = (f"{name}=={version('jax')}" for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"))
    return [*(match[1] for match in of_tpu if match), *cuda, "nvidia-cuda-nvcc>=13"]


if __name__ == "__main__":
    print("\n".join(requirements()))
