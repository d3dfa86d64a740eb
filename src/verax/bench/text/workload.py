"""Workloads of text benchmarks: prompts as token ids, and the number of tokens that each is to get."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from verax.bench.settings import TextSettings
from verax.errors import InvalidParameterError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens.tokenizer import Tokenizer

USUAL = {"short-prompts": (4, 0.7), "nano-vllm": (256, 0.6), "prompt": (1, 0.0), "repeat": (1, 0.0), "chat": (1, 0.0)}
"""Number of prompts and temperature of each workload, unless others are given."""

QUESTIONS = (
    "Tell me a story about a fox and a boat.",
    "Tell me a story about a girl who lost her kite.",
    "What is 47 + 38?",
    "Write a story about a bear and a rabbit.",
    "Give me a JSON record about a dog.",
    "Tell me a story about a boy and a little owl.",
    "What color is the sky?",
    "Tell me a story about a mouse in the garden.",
)
"""Messages of the `chat` workload, of the kinds that the built-in model knows."""


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


def make_workload(settings: TextSettings, vocab_size: int, tokenizer: Tokenizer | None = None) -> Workload:
    """Workload that the settings name, the same tokens every time.

    - `short-prompts`: 12 to 24 random tokens each, temperature 0.7: the case of the earlier ports.
    - `nano-vllm`: nano-vllm's bench.py, prompts and answers of 100 to 1024 tokens; `scale` shrinks both lengths.
    - `prompt`: prompts to be read, one new token each.
    - `repeat`: 48 tokens four times over, which a trained model continues. Random weights do not copy: without a model,
      prompts have their tokens once and one token is favoured instead. Every draft of it holds: the most that drafts
      can gain.
    - `chat`: questions in the checkpoint's chat template, by its `tokenizer`.
    """
    name, rng, favoured = settings.workload, np.random.default_rng(0), None
    usual_count, usual_temperature = USUAL[name]
    count = settings.requests or usual_count
    tokens = lambda size: tuple(rng.integers(3, vocab_size, size).tolist())
    max_tokens = (settings.max_tokens or 1,) * count  # replaced where the workload has lengths of its own
    if name == "nano-vllm":
        dice, highest = random.Random(0), min(10000, vocab_size - 1)
        scale = settings.scale or 1.0
        length = lambda: max(1, round(dice.randint(100, 1024) * scale))
        prompts = tuple(tuple(dice.randint(0, highest) for _ in range(length())) for _ in range(count))
        max_tokens = tuple(length() for _ in range(count))
    elif name == "prompt":
        prompts, max_tokens = tuple(tokens(settings.prompt_tokens) for _ in range(count)), (1,) * count
    elif name == "chat":
        if tokenizer is None:
            raise InvalidParameterError("workload: chat asks a trained model; name one by --model")
        chats = ([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(count))
        texts = map(tokenizer.apply_chat_template, chats)
        prompts = tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    elif name == "repeat":
        times = 1 if settings.model is None else 4
        prompts = tuple(tokens(48) * times for _ in range(count))
        favoured = prompts[0][0] if settings.model is None else None
    else:
        prompts = tuple(tokens(12 + 4 * (i % 4)) for i in range(count))
    temperature = usual_temperature if settings.temperature is None else settings.temperature
    return Workload(name, prompts, max_tokens, temperature, favoured)
