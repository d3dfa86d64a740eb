"""Parts of a run on an accelerator, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verax.bench.accelerator.row import Measured

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """One part, which runs in a process of its own.

    Attributes:
        name: name in commands and of its file.
        about: what it measures.
        load: function that imports what the part needs and returns its measurement, a function of `rehearse`.
    """

    name: str
    about: str
    load: Callable[[], Callable[..., Iterator[Measured]]]


def _tests() -> Callable[..., Iterator[Measured]]:
    from verax.bench.accelerator.correctness import measure_tests

    return measure_tests


def _operations() -> Callable[..., Iterator[Measured]]:
    from verax.bench.accelerator.correctness import measure_operations

    return measure_operations


def _delta() -> Callable[..., Iterator[Measured]]:
    from verax.bench.accelerator.delta import measure_delta

    return measure_delta


def _kernels() -> Callable[..., Iterator[Measured]]:
    from verax.bench.accelerator.kernels import measure_kernels

    return measure_kernels


def _text(shapes: str, quantization: str | None) -> Part:
    def load() -> Callable[..., Iterator[Measured]]:
        from verax.bench.accelerator.text import measure_text

        return partial(measure_text, shapes, quantization)

    size = {"qwen3": "0.6b", "qwen3-8b": "8b"}[shapes]
    precision = quantization or "bfloat16"
    return Part(
        f"text-{size}-{precision}",
        f"Qwen3-{size.upper()} shapes, {precision}: nano-vllm's mix, 4 x 100 tokens, prompts of 512 and 4096",
        load,
    )


def _video(name: str, about: str, *case: Any) -> Part:
    def load() -> Callable[..., Iterator[Measured]]:
        from verax.bench.accelerator.video import measure_video

        return partial(measure_video, *case)

    return Part(f"video-{name}", f"Wan 1.3B, 544 x 960: {about}", load)


_ALL = (
    Part("tests", "tests/gpu, in a checkout", _tests),
    Part("operations", "every implementation of every operation against its reference", _operations),
    # Those that a target is set for come before the rest, in case the time does not suffice.
    _text("qwen3", None),
    _video("57-97", "guided steps of 57 and 97 frames", "transformer", (57, 97)),
    Part("delta", "the gated delta rule: batch 4, 4096 tokens, 16 heads of 128, forward and backward", _delta),
    Part("kernels", "experimental implementations beside the others", _kernels),
    _text("qwen3", "int8"),
    _text("qwen3", "int4"),
    _text("qwen3-8b", None),
    _text("qwen3-8b", "int8"),
    _text("qwen3-8b", "int4"),
    _video("9-17", "guided steps of 9 and 17 frames", "transformer", (9, 17)),
    _video("vae", "decoding 9, 57 and 97 frames", "vae", (9, 57, 97)),
)

PARTS: Mapping[str, Part] = {part.name: part for part in _ALL}
"""Parts by name, correctness first."""
