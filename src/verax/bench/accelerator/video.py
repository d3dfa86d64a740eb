"""Video part: steps of Wan 1.3B's transformer and the decoding of clips, by number of frames."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from verax.bench.accelerator.row import Measured, Row
from verax.bench.video.run import bench_video
from verax.errors import VeraxError

__all__ = ["measure_video"]

SIZE, HEIGHT, WIDTH = "1.3b", 544, 960

TINY_SIZE, TINY_FRAMES, TINY_HEIGHT, TINY_WIDTH = "tiny", 5, 16, 32
"""Model and clip of a rehearsal."""

TARGETS = {57: 0.85, 97: 2.07}
"""Seconds of a guided step on one H200, by number of frames."""

PASSES = 2
"""Forward passes of a guided step: with the prompt, and with the negative one."""


def measure_video(stage: str, frames: Sequence[int], *, rehearse: bool) -> Iterator[Measured]:
    """Seconds of a guided step, or of decoding a clip, by number of frames; beside diffusers where it is installed.

    Args:
        stage: `"transformer"` or `"vae"`.
        frames: numbers of frames of clips of 544 x 960.
        rehearse: a tiny model, and tiny clips in the same places.
    """
    against = ("diffusers",) if importlib.util.find_spec("diffusers") is not None else ()
    for count in frames:
        case = f"{count} frames, " + ("guided step" if stage == "transformer" else "VAE decoding")
        try:
            result = bench_video(
                size=TINY_SIZE if rehearse else SIZE,
                stages=(stage,),
                frames=(TINY_FRAMES if rehearse else count,),
                height=TINY_HEIGHT if rehearse else HEIGHT,
                width=TINY_WIDTH if rehearse else WIDTH,
                runs=1 if rehearse else 3,
                warmup=0 if rehearse else 1,
                against=against,
            )
        except (VeraxError, RuntimeError, MemoryError) as error:  # a clip that does not fit, say: the next may
            yield Measured([Row(case, error=f"{type(error).__name__}: {error}")])
            continue
        yield Measured([_row(case, stage, count, result["cases"][0])], result)


def _row(case: str, stage: str, frames: int, found: dict[str, Any]) -> Row:
    passes = PASSES if stage == "transformer" else 1
    seconds = passes * found["sides"]["verax"]["median_s"]
    return Row(
        case,
        value=seconds,
        unit="s",
        target=TARGETS.get(frames) if stage == "transformer" else None,
        seconds=seconds,
        flops=passes * found["products"],
        bytes_moved=passes * found["bytes_moved"],
        beside={name: side["ratio"] for name, side in found["beside"].items()},
        note=f"compiled in {found['compile_s']:.0f} s",
    )
