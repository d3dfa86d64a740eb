"""`python -m recipes.text.prediction_head`: train the built-in model's head of multi-token prediction.

The model stays unchanged and teaches: the head learns the model's own probabilities of the tokens 2 to `PASSES + 1`
ahead. It is trained on its own hidden states too, since drafts are made by applying it repeatedly (as in EAGLE-3, Li et
al., 2025, arXiv:2503.01840).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from recipes import parse
from recipes.text.recipe import as_read, token_batches
from verax import builtin, checkpoint, ops
from verax.checkpoint import save
from verax.checkpoint.checkpoint import fingerprint
from verax.loading import load_causal_lm
from verax.models import causal_lm
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear

PASSES = 3
"""Times that the head is applied: as many drafts are trained."""

DISCOUNT = 0.8
"""Weight of each further pass: its draft counts only if those before it hold."""

SCHEDULE = Schedule(steps=400, peak_learning_rate=3e-3, warmup_steps=30)


def train_head(output: Path, *, model: Path | None = None, steps: int | None = None, seed: int = 0, **run: Any) -> Path:
    """Train a head for a model of `recipes.text`, and export both as one folder, `output / "model"`, which is returned.

    The head begins with the weights of the model's last layer, or as the folder's own head if it has one.

    Args:
        output: as in `train_builtin`, and so are `seed` and `run`.
        model: folder of the model; the built-in one if None.
        steps: length of the schedule; the recipe's own if None.
    """
    folder = model or builtin.text_model()
    opened = checkpoint.Checkpoint.open(folder)
    config = {**opened.config, "num_nextn_predict_layers": 1}
    architecture, sizes = causal_lm(config, prediction_head=True)
    if "mtp.fc.weight" in opened.names():
        whole: Any = load_causal_lm(opened, prediction_head=True, dtype="float32")
    else:
        trunk: Any = load_causal_lm(opened, dtype="float32")
        whole = architecture(sizes, rngs=nnx.Rngs(seed))
        nnx.update(whole.model, nnx.state(trunk.model))
        nnx.update(whole.mtp.layers[0], nnx.state(whole.model.layers[-1]))
    graph, head, rest = nnx.split(whole, lambda path, _: path[0] == "mtp", ...)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def loss(rest: Any, head: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        return head_loss(nnx.merge(graph, *jax.tree.map(lambda p: p.astype(jnp.bfloat16), (head, rest))), batch)

    trained = train(
        Partial(loss, rest),
        jax.tree.map(jnp.copy, head),  # a layer of it is the model's last one so far
        lambda start: token_batches(tokenizer, seed + 1, start),  # not the batches that the model has seen
        SCHEDULE.of(steps),
        output,
        settings={"seed": seed, "base": fingerprint(opened)},
        **run,
    )
    kept = {name: jnp.asarray(opened.read(name)) for name in opened.names() if not name.startswith("mtp.")}
    new = {".".join(map(str, path)): leaf[...].astype(jnp.bfloat16) for path, leaf in nnx.to_flat_state(trained)}
    exported = save({**kept, **new}, output / "model", config=config)
    for path in folder.iterdir():
        if path.suffix == ".json" and not (exported / path.name).exists():
            shutil.copy(path, exported)
    return exported


def head_loss(model: Any, batch: dict[str, Array]) -> Float[Array, ""]:
    """Mean cross-entropy, nats, of the head's probabilities with the model's own, over all passes.

    `batch`: as in `packed_loss`.
    """
    tokens, visible, at = as_read(batch)
    visible, at, following = visible[:, :-1], at[:, :-1], tokens[:, 1:]

    def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        return ops.attention(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), segments=visible, **options)

    with ops.use_implementations(linear=rounded_gradient_linear):
        hidden = model(tokens[:, :-1], at, attend)
        teacher = jax.lax.stop_gradient(jax.nn.softmax(model.logits(hidden)[:, 1:], axis=-1))
        passes, total, weights = _Passes(visible), jnp.zeros(()), 0.0
        for i in range(PASSES):
            hidden = model.predict(hidden, following, at, passes.attend)
            logprobs = jax.nn.log_softmax(model.logits(hidden)[:, :-1], axis=-1)
            counted = (visible[:, 1:] == jnp.roll(visible, i, axis=1)[:, :-1]) & (visible[:, 1:] > 0)
            counted &= jnp.arange(counted.shape[1]) >= i
            total += DISCOUNT**i * -jnp.sum(jnp.sum(teacher * logprobs, axis=-1) * counted) / jnp.sum(counted)
            weights += DISCOUNT**i
            hidden = jnp.roll(hidden, 1, axis=1)  # of the position before, as when the head drafts
            passes.start_next()
    return total / weights


class _Passes:
    """Attention of repeated passes of the head over whole rows, as drafting has it.

    Pass i at position t continues the pass i - 1 at t - 1. So it sees the keys of the first pass up to t - i, and one
    key of each pass between: pass j's at t - (i - j).
    """

    def __init__(self, segments: Array):
        self._segments = segments
        self._made: list[tuple[Array, Array]] = []
        self._pass = 0

    def start_next(self) -> None:
        """Count one more pass."""
        self._pass += 1

    def attend(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Float[Array, "B T N H"]:
        """Causal attention of the current pass."""
        repeats, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        self._made.append((k, v))
        first_k, first_v = self._made[0]
        scores = scale * jnp.einsum("btnh,bsnh->bnts", q, first_k) + jnp.where(self._seen(), 0.0, -1e30)[:, None]
        own = [[jnp.roll(x, self._pass - j, axis=1) for x in self._made[j]] for j in range(1, self._pass + 1)]
        further = [scale * jnp.einsum("btnh,btnh->bnt", q, key)[..., None] for key, _ in own]
        weights = jax.nn.softmax(jnp.concatenate([scores, *further], axis=-1), axis=-1)
        T = k.shape[1]
        out = jnp.einsum("bnts,bsnh->btnh", weights[..., :T], first_v)
        for i, (_, value) in enumerate(own):
            out += jnp.einsum("bnt,btnh->btnh", weights[..., T + i], value)
        return out

    def _seen(self) -> Bool[Array, "B T T"]:
        """Keys of the first pass that each query sees."""
        at = jnp.arange(self._segments.shape[1])
        return (self._segments[:, :, None] == self._segments[:, None]) & (at[:, None] - self._pass >= at[None])


if __name__ == "__main__":
    print(f"trained: {train_head(**parse(__doc__, 'runs/text-head'))}")
