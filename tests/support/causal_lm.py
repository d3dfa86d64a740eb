"""A language model of transformers and verax on its checkpoint: logits, greedy tokens and log-probabilities of both."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import tiny_tokenizer
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

GREEDY = dict(temperature=0, ignore_eos=True, logit_bias={1: -100.0})
"""Sampling options that match `continuations`, where `min_new_tokens` forbids the end of text as this bias does."""


def save_reference(model, folder: Path, dtype: torch.dtype | None = None):
    """A transformers model in `dtype` or float32, saved to `folder` with a tokenizer."""
    model.to(dtype or torch.float32).save_pretrained(folder)
    tiny_tokenizer(folder, vocab_size=model.config.vocab_size)
    return model


def model_logits(model, tokens) -> np.ndarray:
    """Scores `[B, T, V]` of a model of verax, float64."""
    return np.asarray(jax.jit(lambda t: model.logits(model(t)))(jnp.asarray(tokens)), np.float64)


def logits(folder: Path, tokens, dtype: str = "float32", **options) -> np.ndarray:
    """Scores `[B, T, V]` of a checkpoint in verax, float64."""
    return model_logits(load_causal_lm(Checkpoint.open(folder), dtype=dtype, **options), tokens)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Distance of a from b, as a part of b's length."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def engine(folder: Path, **options) -> LLM:
    """A small engine in float32: chunks of 32 tokens, two sequences at a time."""
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=256)
    return LLM(folder, use_tqdm=False, **{"dtype": "float32", **sizes, **options})


def continuations(theirs, prompts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    """Greedy tokens of a transformers model after each prompt."""
    result = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        result.append(tuple(out[0, len(prompt) :].tolist()))
    return result


def bfloat16_errors(folder: Path, tokens: np.ndarray) -> tuple[float, float]:
    """Relative errors in bfloat16 of verax and of transformers, both against transformers in float32.

    Args:
        folder: a checkpoint whose weights are rounded to bfloat16 already, so that the float32 run is the truth of
            both. transformers reads it as users do: `model.to(bfloat16)` would round the rotary frequencies too.
        tokens: token ids `[B, T]`.
    """
    ids = torch.tensor(tokens)

    def theirs(dtype: torch.dtype) -> np.ndarray:
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(ids).logits.float().numpy()

    truth = theirs(torch.float32)
    return relative(logits(folder, tokens, "bfloat16"), truth), relative(theirs(torch.bfloat16), truth)


def logprob_errors(llm: LLM, theirs, prompt: list[int], **options) -> np.ndarray:
    """Differences of prompt log-probabilities, of an engine less a transformers model, from the second token on.

    `options` go to `LLM.generate`.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate([prompt], params, use_tqdm=False, **options)[0]
    with torch.no_grad():
        exact = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0].double(), -1).numpy()
    got = [output.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]
    return np.asarray(got) - exact[np.arange(len(prompt) - 1), prompt[1:]]
