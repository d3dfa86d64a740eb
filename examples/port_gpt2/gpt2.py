"""GPT-2 (Radford et al., 2019) as a Flax NNX module whose paths are the keys of the published checkpoints.

Follows transformers' `GPT2LMHeadModel`. docs/porting.md describes how it was written, and what was wrong on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.checkpoint import Checkpoint
from verax.errors import UnsupportedModelError
from verax.loading import load_model
from verax.models import AttentionFn, causal_attention
from verax.nn import Embedding, LayerNorm

__all__ = ["GPT2Config", "GPT2LMHeadModel", "greedy", "load"]

INIT_STD = 0.02
"""Standard deviation of fresh weights (section 2.3 of GPT's report)."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu_new": jax.nn.gelu, "relu": jax.nn.relu}
"""By transformers' names; `gelu_new` is the approximation by tanh."""

_REQUIRED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Options of transformers' port, and the one value of each that this file computes."""


@dataclass(frozen=True)
class GPT2Config:
    """Sizes, by the names of config.json."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GPT2Config:
        """Read a config.json of `model_type` gpt2.

        Raises:
            UnsupportedModelError: for another model, a missing size, or an option that is not computed here.
        """
        if config.get("model_type") != "gpt2":
            raise UnsupportedModelError(f"config.json has model_type {config.get('model_type')!r}, expected 'gpt2'")
        if missing := [name for name in _REQUIRED if name not in config]:
            raise UnsupportedModelError(f"config.json of a gpt2 model lacks {', '.join(missing)}")
        for name, value in _ONLY.items():
            if config.get(name, value) != value:
                raise UnsupportedModelError(f"gpt2 with {name} {config[name]} is not supported, only with {value}")
        read = cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})
        if read.activation_function not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation_function {read.activation_function!r} is not supported; those that are: "
                + ", ".join(ACTIVATIONS)
            )
        return read

    @property
    def num_hidden_layers(self) -> int:
        """Layers, by the name that verax's engine reads."""
        return self.n_layer

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.n_embd // self.n_head

    @property
    def max_position_embeddings(self) -> int:
        """Learned positions: no sequence may be longer."""
        return self.n_positions


class Conv1D(nnx.Module):
    """`x W + b` with `weight [in, out]`: GPT-2's linear layers are stored the other way round."""

    def __init__(self, size_in: int, size_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (size_in, size_out), dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        """Map the last axis."""
        return ops.linear(x, self.weight[...].T, self.bias[...])


class Attention(nnx.Module):
    """Multi-head attention; `attend` decides which tokens see each other."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.n_embd
        self.heads = config.n_head
        self.c_attn = Conv1D(D, 3 * D, dtype=dtype, rngs=rngs)
        self.c_proj = Conv1D(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B T D"], layer: int, attend: AttentionFn) -> Float[Array, "*B T D"]:
        """Queries, keys and values come out of one projection, in this order."""
        q, k, v = (y.reshape(*x.shape[:-1], self.heads, -1) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        return self.c_proj(attend(layer, q, k, v).reshape(x.shape))


class MLP(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.n_embd
        F = config.n_inner or 4 * D
        self.activation = ACTIVATIONS[config.activation_function]
        self.c_fc = Conv1D(D, F, dtype=dtype, rngs=rngs)
        self.c_proj = Conv1D(F, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Up, activation, down."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nnx.Module):
    """Attention, then feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, eps = config.n_embd, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(D, eps=eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, rngs=rngs)
        self.ln_2 = LayerNorm(D, eps=eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B T D"], layer: int, attend: AttentionFn) -> Float[Array, "*B T D"]:
        """One layer."""
        x = x + self.attn(self.ln_1(x), layer, attend)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nnx.Module):
    """Tokens to hidden states."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.n_embd
        self.wte = Embedding(config.vocab_size, D, dtype=dtype, rngs=rngs)
        self.wpe = Embedding(config.n_positions, D, dtype=dtype, rngs=rngs)
        self.h = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.n_layer)])
        self.ln_f = LayerNorm(D, eps=config.layer_norm_epsilon, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*#B T"], attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        """Final hidden states; positions are below `n_positions`."""
        x = self.wte(tokens) + self.wpe(positions)
        for layer, block in enumerate(self.h):
            x = block(x, layer, attend)
        return self.ln_f(x)


class GPT2LMHeadModel(nnx.Module):
    """The language model, a `verax.models.CausalLM`. Everything between matmuls is float32."""

    ignored_weights = (r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$")
    """Causal masks, which old files hold, and the tied head."""

    key_aliases = ((r"^transformer\.", ""),)
    """Keys as OpenAI published them have no prefix; transformers saves with one."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.transformer = GPT2Model(config, dtype=dtype, rngs=rngs)

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the weights, and of keys and values."""
        return self.transformer.wte.weight.get_value().dtype

    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*#B T"] | None = None,
        attend: AttentionFn | None = None,
    ) -> Float[Array, "*B T D"]:
        """Final hidden states. Without `attend`: causal attention over `[B, T]` tokens at positions 0..T-1."""
        if positions is None:
            positions = jnp.arange(tokens.shape[-1])[None]
        return self.transformer(tokens, positions, attend or causal_attention(self.dtype))

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores of the token after each, by the embedding's transpose."""
        return self.transformer.wte.attend(hidden)


def load(model: str | Path, *, dtype: DTypeLike = jnp.float32) -> GPT2LMHeadModel:
    """Read a folder or hub id.

    Raises:
        CheckpointError: if weights are missing, damaged or of another shape.
        UnsupportedModelError: if config.json asks for what is not computed here.
    """
    opened = Checkpoint.open(model)
    return load_model(opened, GPT2LMHeadModel, GPT2Config.from_hf(opened.config), dtype=dtype)


def greedy(model: GPT2LMHeadModel, prompt: list[int], count: int) -> tuple[list[int], Float[Array, "count V"]]:
    """The `count` likeliest tokens after a prompt, one after the other, and the logits that each was taken by.

    Everything is computed again for each token, at one shape, so that there is one program and no cache to get wrong.
    """
    tokens = jnp.zeros((1, len(prompt) + count), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt))
    step = nnx.jit(lambda model, tokens, at: model.logits(model(tokens)[0, at - 1]))
    found, logits = [], []
    for at in range(len(prompt), len(prompt) + count):
        logits.append(step(model, tokens, at))
        found.append(int(logits[-1].argmax()))
        tokens = tokens.at[0, at].set(found[-1])
    return found, jnp.stack(logits)
