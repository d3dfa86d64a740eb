"""Tokens of an engine, and of its model without cache, engine and carried state."""

import jax
import jax.numpy as jnp
import numpy as np


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def alone(llm, prompt, params):
    """Tokens of a prompt in a batch of its own."""
    return tokens(llm.generate([prompt], params, use_tqdm=False))[0]


def plain_scores(llm, length=96):
    """The model by itself: a function of a text to the scores after each of its tokens."""
    runner = llm.engine.runner

    @jax.jit
    def scores(text):
        model = runner.abstract_model.build(runner._weights)
        return model.logits(model(text[None])[0])

    return lambda text: np.asarray(scores(jnp.asarray([*text, *[0] * (length - len(text))])))[: len(text)]


def greedy_answer(scores, prompt, count):
    """The greedy answer of the model by itself: a forward pass over the whole text for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(scores(text)[-1].argmax()))
    return tuple(text[len(prompt) :])
