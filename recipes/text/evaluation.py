"""Evaluation of a built-in language model: loss on unseen text, unseen sums, valid JSON, answers that end."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import tokenizers
from flax import nnx

from recipes.text.arithmetic import addition_exam, leading_number
from recipes.text.recipe import batch, packed_loss
from recipes.text.records import record, record_request
from recipes.text.stories import story, story_request
from verax import checkpoint
from verax.loading import load_causal_lm
from verax.models import CausalLM
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams


def evaluate(folder: Path, *, samples: int = 100) -> dict[str, float]:
    """Measure a trained folder with the engine that users run.

    Returns:
        `held_out_loss` (nats per token) and `perplexity`; the shares of correct answers to every held-out addition, in
        chat (`addition_chat`) and as text to complete (`addition_text`); the shares of `json_valid` and `json_exact`
        answers to `samples` requests for JSON; the share of `samples` sampled stories that end within 300 tokens
        (`stories_end`).
    """
    model = load_causal_lm(checkpoint.Checkpoint.open(folder), dtype="float32")
    loss = _held_out_loss(model, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    llm = LLM(folder, max_num_seqs=32, max_model_len=512, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=120)
    asked = list(addition_exam("held_out", chat=True))
    completed = list(addition_exam("held_out"))
    rng = Random(1)
    records = [record_request(rng, record(rng)) for _ in range(samples)]
    stories = [story_request(rng, story(rng, "held_out")) for _ in range(samples)]
    answers = _answers(llm, [exchange.question for exchange in records], greedy)
    sampled = _answers(llm, [e.question for e in stories], SamplingParams(temperature=0.7, max_tokens=300, seed=0))
    texts = llm.generate([e.question for e in completed], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return {
        "held_out_loss": loss,
        "perplexity": float(np.exp(loss)),
        "addition_chat": _share(
            o.text == e.answer for o, e in zip(_answers(llm, [e.question for e in asked], greedy), asked, strict=True)
        ),
        "addition_text": _share(
            leading_number(o.outputs[0].text) == e.answer.strip() for o, e in zip(texts, completed, strict=True)
        ),
        "json_valid": _share(_parses(o.text) for o in answers),
        "json_exact": _share(o.text == e.answer for o, e in zip(answers, records, strict=True)),
        "stories_end": _share(o.finish_reason == "stop" for o in sampled),
    }


def _held_out_loss(model: CausalLM, tokenizer: tokenizers.Tokenizer) -> float:
    """Loss on unseen documents, in nats per token: held-out sums and stories, and new draws of the rest."""
    graph, params = nnx.split(model)
    loss = jax.jit(lambda params, batch: packed_loss(nnx.merge(graph, params), batch))
    unseen = (batch(i, tokenizer, seed=1, batch_size=32, length=129, split="held_out") for i in range(8))
    return float(np.mean([loss(params, one) for one in unseen]))


def _answers(llm: LLM, questions: list[str], params: SamplingParams) -> list[Any]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def _share(outcomes: Any) -> float:
    return float(np.mean(list(outcomes)))


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
