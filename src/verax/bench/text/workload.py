"""Workloads of text benchmarks: prompts as token ids, and the number of tokens that each is to get."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from verax.text.engine.sampling_params import SamplingParams

__all__ = ["WORKLOADS", "Workload", "nano_vllm", "prompt", "repeat", "short_prompts"]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens that each is to get."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    temperature: float
    favoured: int | None = None
    """Token that is made so likely that answers consist of nothing else."""

    @property
    def new_tokens(self) -> int:
        """Number of tokens that a run generates."""
        return sum(self.max_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that a run reads."""
        return sum(map(len, self.prompts))

    @property
    def counted_tokens(self) -> int:
        """Number of tokens that rates count: the new ones, or the prompts' where the workload is to read them."""
        return self.prompt_tokens if self.name == "prompt" else self.new_tokens

    @property
    def longest(self) -> int:
        """Length of the longest text."""
        return max(len(p) + m for p, m in zip(self.prompts, self.max_tokens, strict=True))

    def steps(self, max_num_seqs: int) -> int:
        """Least number of steps of an engine with at most `max_num_seqs` sequences in each."""
        return max(*self.max_tokens, math.ceil(self.new_tokens / max_num_seqs), 1)

    def params(self) -> list[SamplingParams]:
        """Sampling of each prompt: temperature only, no end of text."""
        bias = None if self.favoured is None else {self.favoured: 100.0}
        return [
            SamplingParams(temperature=self.temperature, max_tokens=m, ignore_eos=True, logit_bias=bias)
            for m in self.max_tokens
        ]


def short_prompts(vocab_size: int, *, requests: int = 4, max_tokens: int = 100, temperature: float = 0.7) -> Workload:
    """Short prompts of random tokens, 100 new tokens each, temperature 0.7: the case of the earlier ports."""
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(3, vocab_size, 12 + 4 * (i % 4)).tolist()) for i in range(requests))
    return Workload("short-prompts", prompts, (max_tokens,) * requests, temperature)


def nano_vllm(vocab_size: int, *, requests: int = 256, scale: float = 1.0, temperature: float = 0.6) -> Workload:
    """nano-vllm's bench.py: prompts and answers of 100 to 1024 tokens each; `scale` shrinks both lengths."""
    rng = random.Random(0)
    length = lambda: max(1, round(rng.randint(100, 1024) * scale))
    prompts = tuple(tuple(rng.randint(0, min(10000, vocab_size - 1)) for _ in range(length())) for _ in range(requests))
    return Workload("nano-vllm", prompts, tuple(length() for _ in range(requests)), temperature)


def prompt(vocab_size: int, *, requests: int = 1, tokens: int = 512, temperature: float = 0.0) -> Workload:
    """Prompts of `tokens` tokens to be read; one new token each."""
    prompts = np.random.default_rng(0).integers(3, vocab_size, (requests, tokens)).tolist()
    return Workload("prompt", tuple(map(tuple, prompts)), (1,) * requests, temperature)


def repeat(
    vocab_size: int, *, requests: int = 1, max_tokens: int = 100, temperature: float = 0.0, trained: bool = True
) -> Workload:
    """Prompts of 48 tokens four times over, which a trained model continues.

    Random weights do not copy. Where the model is not `trained`, the prompts have their tokens once and one token is
    favoured instead. Every draft of it holds: the most that drafts can gain.
    """
    rng = np.random.default_rng(0)
    times = 4 if trained else 1
    prompts = tuple(tuple(rng.integers(3, vocab_size, 48).tolist() * times) for _ in range(requests))
    favoured = None if trained else prompts[0][0]
    return Workload("repeat", prompts, (max_tokens,) * requests, temperature, favoured)


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "short-prompts": short_prompts,
    "nano-vllm": nano_vllm,
    "prompt": prompt,
    "repeat": repeat,
}
"""Workloads by name, as functions of the vocabulary's size."""
