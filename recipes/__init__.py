"""How the built-in models were trained; not part of the wheel.

`python -m recipes.text`, `python -m recipes.encoder` and `python -m recipes.video` run from a checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """Parser of a recipe's options, whose default output folder is `output`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument(
        "-o", "--output", type=Path, default=Path(output), help="folder for states, logs, plots, model"
    )
    options.add_argument("--steps", type=int, help="length of the schedules; the recipe's own if left out")
    options.add_argument("--seed", type=int, default=0, help="seed of data, noise, tokenizer and initial weights")
    options.add_argument("--resume", action="store_true", help="continue from the states in the output folder")
    return options


def parse(description: str | None, output: str) -> dict[str, Any]:
    """Options of a recipe that has no options of its own, as arguments of its function."""
    return vars(parser(description, output).parse_args())


def print_measurements(values: Mapping[str, float]) -> None:
    """Print one line a measurement, its name in words."""
    for name, value in values.items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")
