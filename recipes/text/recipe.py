"""Recipe of the built-in language model: tokenizer, sizes, data, schedule and export.

The model has about 2.9 million parameters in the Qwen3 architecture. Its training text comes from `data`: stories,
sums, facts, JSON records, and chats about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32
from tokenizers import Regex, Tokenizer, pre_tokenizers

from recipes import byte_level_bpe, save_tokenizer
from recipes.text.arithmetic import Split
from recipes.text.data import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START, Document, documents
from verax import ops
from verax.checkpoint import save
from verax.files import write_json
from verax.models import CausalLM, causal_lm
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
VOCAB_SIZE = 1536
TRAINING_DOCUMENTS = 60_000

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Qwen2: words with the space before them, single digits, runs of punctuation, line ends."""


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Byte-level BPE of `VOCAB_SIZE` tokens as in GPT-2 and Qwen, from the first training documents of the seed.

    Every digit is a separate token. Nothing is normalised, so that decoding restores every text exactly.
    """
    texts = (document.text for document in islice(documents(seed), TRAINING_DOCUMENTS))
    return byte_level_bpe(texts, VOCAB_SIZE, SPECIAL_TOKENS, [pre_tokenizers.Split(Regex(_SPLIT), "isolated")])


_ENCODED_AT_ONCE = 64
"""Documents per call of the tokenizer: enough to hide the call's cost, few enough to waste little per batch."""


class Row(NamedTuple):
    """Packed row of T tokens.

    `segments` number the documents of the row from 1; padding is 0. `positions` count from 0 in each segment. A
    document that crosses the end of a row continues in the next row as a new segment.
    """

    tokens: Int32[np.ndarray, "T"]
    segments: Int32[np.ndarray, "T"]
    positions: Int32[np.ndarray, "T"]


def _row(pieces: list[list[int]], length: int) -> Row:
    sizes = [len(piece) for piece in pieces]
    segments = np.repeat(np.arange(1, len(pieces) + 1), sizes)
    columns = np.concatenate(pieces), segments, np.concatenate([np.arange(size) for size in sizes])
    return Row(*(np.pad(column.astype(np.int32), (0, length - len(column))) for column in columns))


def _encoded(texts: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    stream = iter(texts)
    while chunk := [document.text for document in islice(stream, _ENCODED_AT_ONCE)]:
        for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            yield encoding.ids


def pack(texts: Iterable[Document], tokenizer: Tokenizer, length: int) -> Iterator[Row]:
    """Rows of `length` tokens, cut from the concatenated documents; only the last row may end in padding."""
    pieces: list[list[int]] = []
    free = length
    for ids in _encoded(texts, tokenizer):
        start = 0
        while start < len(ids):
            piece = ids[start : start + free]
            pieces.append(piece)
            start += len(piece)
            free -= len(piece)
            if free == 0:
                yield _row(pieces, length)
                pieces, free = [], length
    if pieces:
        yield _row(pieces, length)


def batch(
    step: int, tokenizer: Tokenizer, *, seed: int, batch_size: int, length: int, split: Split = "train"
) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Batch of a step: `tokens`, `segments` and `positions`. It does not depend on other steps."""
    rows = islice(pack(documents(f"{seed}/{step}", split=split), tokenizer, length), batch_size)
    columns = zip(*rows, strict=True)
    return {name: np.stack(column) for name, column in zip(Row._fields, columns, strict=True)}


CONTEXT = 1024

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": CONTEXT,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of weights that end a residual branch."""

SCHEDULE = Schedule(steps=4400, peak_learning_rate=2e-3, warmup_steps=150)

ROWS = ((32, 128), (32, 128), (32, 128), (32, 128), (32, 128), (8, 512))
"""Shapes (rows, tokens) of consecutive batches, about 4,096 tokens each. Most documents have fewer than 128 tokens, and
attention over short rows is cheap. The long rows, which are read as one text, teach distances up to 512."""


def train_builtin(output: Path, *, steps: int | None = None, seed: int = 0, **run: Any) -> Path:
    """Train the built-in model and export it as a Hugging Face folder, `output / "model"`, which is returned.

    Training takes under an hour on two CPU cores. `output` also receives the training state, the log and the loss plot.

    Args:
        output: folder, created if missing.
        steps: length of the schedule, for trials; the recipe's own if None.
        seed: seed of data, tokenizer and initial weights.
        run: further options of `verax.train.loop.train`, such as `resume`.
    """
    tokenizer = train_tokenizer(seed)
    graph, params = initial(seed)
    trained = train(
        lambda params, batch: packed_loss(nnx.merge(graph, params), batch),
        params,
        lambda start: token_batches(tokenizer, seed, start),
        SCHEDULE.of(steps),
        output,
        settings={"seed": seed},
        **run,
    )
    return export(nnx.merge(graph, trained), tokenizer, output / "model")


def initial(seed: int) -> tuple[nnx.GraphDef[Any], nnx.State]:
    """Initial weights of a seed. The last weights of a residual branch are scaled down by the depth, as in GPT-2."""
    architecture, config = causal_lm(CONFIG)
    graph, params = nnx.split(architecture(config, rngs=nnx.Rngs(seed)))
    for path, weight in nnx.to_flat_state(params):
        if ".".join(map(str, path)).endswith(RESIDUAL_OUTPUTS):
            weight[...] = weight[...] * (2 * config.num_hidden_layers) ** -0.5
    return graph, params


def next_token_loss(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B S"], segments: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of token t + 1 given the logits at t, over a packed batch; S = T + 1.

    The first token of a document is not predicted: its segment differs from the segment of the token before it. Padding
    (segment 0) is not predicted either.
    """
    counted = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    target = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(target * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def as_read(batch: dict[str, Array]) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"]]:
    """Tokens, segments whose tokens see each other, and positions of a packed batch, as the model reads them.

    Long rows are read as one text, so that the model meets positions that no document of its own reaches.
    """
    tokens, segments, positions = (jnp.asarray(batch[name]) for name in ("tokens", "segments", "positions"))
    if tokens.shape[1] <= 256:
        return tokens, segments, positions
    return tokens, jnp.where(segments > 0, 1, 0), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def packed_loss(model: CausalLM, batch: dict[str, Array]) -> Float[Array, ""]:
    """Next-token loss, in nats, of a packed batch: `tokens`, `segments`, `positions` of T + 1 columns.

    Products are in bfloat16.
    """
    graph, params = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    tokens, visible, at = as_read(batch)

    def attend(
        layer: int, q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], **options: Any
    ) -> Float[Array, "B T N H"]:
        return ops.attention(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), segments=visible[:, :-1], **options)

    with ops.use_implementations(linear=rounded_gradient_linear):
        logits = model.logits(model(tokens[:, :-1], at[:, :-1], attend))
    return next_token_loss(logits, tokens, jnp.asarray(batch["segments"]))


def token_batches(tokenizer: Tokenizer, seed: int, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches from a step on, of the shapes `ROWS`."""
    step = start
    while True:
        rows, length = ROWS[step % len(ROWS)]
        yield batch(step, tokenizer, seed=seed, batch_size=rows, length=length + 1)
        step += 1


def export(model: nnx.Module, tokenizer: Tokenizer, folder: Path) -> Path:
    """Save the model in bfloat16, and the tokenizer, as a Hugging Face folder."""
    save(model, folder, config=CONFIG, dtype=jnp.bfloat16)
    special = {"bos_token": None, "eos_token": TURN_END, "pad_token": END_OF_TEXT, "unk_token": None}
    save_tokenizer(tokenizer, folder, **special, model_max_length=CONTEXT, chat_template=CHAT_TEMPLATE)
    ends = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    write_json(folder / "generation_config.json", generation)
    return folder
