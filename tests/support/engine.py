"""Requests of an engine, its tokens under pressure, and the tokens of its model without cache, engine and state."""

import asyncio
import contextlib
import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.invariants import check_engine
from verax.text.engine.blocks import BlockManager
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 64, 7, 40, 12, 3, 50)]


def generate(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def alone(llm, prompt, params=GREEDY):
    """Tokens of a prompt in a batch of its own."""
    return tokens(generate(llm, [prompt], params))[0]


def finish(llm):
    """Outputs of the requests that were added, in the order of their ends."""
    ended = []
    while llm.has_unfinished_requests:
        ended += [output for output in llm.step() if output.finished]
        check_engine(llm.engine)
    return ended


async def until_idle(served):
    """Wait until an asynchronous engine has nothing to do."""
    while served.stats().num_requests_running or served.stats().num_requests_waiting:
        await asyncio.sleep(0.001)
    for engine in served.llm.engines:
        check_engine(engine)


def add_slowly(llm, prompts, params=GREEDY):
    """Tokens of prompts that are added one by one while the ones before them run."""
    ended, ids = [], []
    while len(ended) < len(prompts):
        if len(ids) < len(prompts):
            ids.append(llm.add_request(prompts[len(ids)], params))
        for _ in range(3):
            ended += [output for output in llm.step() if output.finished]
    return tokens(sorted(ended, key=lambda output: ids.index(output.request_id)))


@contextlib.contextmanager
def few_blocks(llm, *counts, caching=True):
    """The scheduler of an engine that has fewer blocks of each group than there are pages, and no cached prefix."""
    engine, config, own = llm.engine, llm.engine.runner.config, llm.engine.scheduler
    assert all(count <= group.num_blocks for count, group in zip(counts, config.groups, strict=True))
    engine.scheduler = Scheduler(
        BlockManager(
            counts,
            config.block_size,
            windows=[group.window for group in config.groups],
            enable_prefix_caching=caching and own.blocks.enable_prefix_caching,
            num_states=config.num_kept_states or None,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        decode_steps={shape.rows: shape.decode_steps for shape in config.repeated},
    )
    try:
        yield engine.scheduler
        check_engine(engine)
    finally:
        engine.scheduler = own
        own.blocks.reset_prefix_cache()  # the pages that it has listed were written to


@contextlib.contextmanager
def nothing_compiles(llm):
    """Assert that XLA compiles nothing in this context, and that no program gets another variant."""
    compiled, before, thread = [], llm.engine.runner.num_compiled(), threading.get_ident()

    def note(name, *_, **details):
        # Threads of other tests' engines may compile meanwhile.
        if "backend_compile" in name and threading.get_ident() == thread:
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield
    assert llm.engine.runner.num_compiled() == before
    assert compiled == []


def plain_scores(llm, length=96):
    """The model by itself: a function of a text to the scores after each of its tokens."""
    runner = llm.engine.runner

    @jax.jit
    def scores(text):
        model = runner.abstract_model.build(runner._weights)
        return model.logits(model(text[None])[0])

    return lambda text: np.asarray(scores(jnp.asarray([*text, *[0] * (length - len(text))])))[: len(text)]


def greedy_answer(scores, prompt, count=GREEDY.max_tokens):
    """The greedy answer of the model by itself: a forward pass over the whole text for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(scores(text)[-1].argmax()))
    return tuple(text[len(prompt) :])


def as_replicas(*llms):
    """One LLM whose replicas are the engines of several LLMs of a model, on the one device of this process."""
    together = copy.copy(llms[0])
    together._use([llm.engine for llm in llms])
    return together
