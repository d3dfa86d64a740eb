"""Collectives in the compiled programs of a video pipeline."""

import re
from collections import Counter


def collectives(program):
    """Number of each kind of collective in the first program that a `video.programs.Program` has compiled."""
    compiled = next(iter(program._compiled.values()))
    return Counter(
        re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)\(", compiled.as_text())
    )
