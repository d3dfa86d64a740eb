"""Qwen3-MoE and Qwen2-MoE: Qwen3 and Qwen2 with a mixture of experts for the feed-forward part of all or some layers.

Follows transformers' `Qwen3MoeForCausalLM` and `Qwen2MoeForCausalLM`. A layer's experts are two stacks, as in
transformers' modules and in checkpoints of Qwen3.5-MoE; other checkpoints have a key for each matrix, which
`stacked_weights` says. Reports: Qwen3 (arXiv:2505.09388), mixture of experts (Shazeer et al., 2017, arXiv:1701.06538),
the shared expert (Dai et al., 2024, arXiv:2401.06066).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import CheckpointError
from verax.fields import Count, Size, file_of, read_fields, read_value
from verax.files import JsonObject
from verax.models import qwen3
from verax.models.qwen3 import MLP, Qwen3Config, Qwen3ForCausalLM
from verax.nn import Linear
from verax.nn.parallel import part_index, sum_parts
from verax.ops.division import Division

__all__ = ["STACKED_EXPERTS", "ExpertsConfig", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "SparseMoeBlock"]

STACKED_EXPERTS = (
    (r"^(.*\.experts)\.gate_up_proj$", (r"\1.{}.gate_proj.weight", r"\1.{}.up_proj.weight")),
    (r"^(.*\.experts)\.down_proj$", (r"\1.{}.down_proj.weight",)),
)
"""Keys of the matrices that make up a stack: of each expert, those that lie one below the other."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts of a model, by the names of config.json."""

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Count = 0
    """Width of the expert that every token passes; 0 for none."""
    norm_topk_prob: bool = True
    """True if the weights of a token's experts are made to add up to 1."""
    layers: frozenset[int] = frozenset()
    """Layers that have experts; the others have a feed-forward part."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], depth: int) -> ExpertsConfig | None:
        """Read the keys about experts of a config.json with `depth` layers; None if no layer has any."""
        family = read_value(config, "model_type", str, "")
        if "num_experts" not in config and "num_local_experts" in config:
            config = JsonObject({**config, "num_experts": config["num_local_experts"]}, file_of(config))
        dense = read_value(config, "mlp_only_layers", tuple[int, ...], ())
        step = read_value(config, "decoder_sparse_step", Size, 1)
        layers = frozenset(i for i in range(depth) if i not in dense and (i + 1) % step == 0)
        if not layers or read_value(config, "num_experts", Count, None) == 0:
            return None
        shared = () if family == "qwen3_moe" else ("shared_expert_intermediate_size",)
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", *shared)
        sizes = read_fields(config, cls, names)
        if sizes["num_experts_per_tok"] > sizes["num_experts"]:
            raise CheckpointError(
                f"{file_of(config)}: num_experts_per_tok {sizes['num_experts_per_tok']} is more than num_experts "
                f"{sizes['num_experts']}"
            )
        # As transformers has it: Qwen3.5 has no such key, and the default of the others differs.
        normalised = read_value(config, "norm_topk_prob", bool, family not in ("qwen2_moe", "qwen3_moe"))
        return cls(**sizes, norm_topk_prob=normalised or family.startswith("qwen3_5"), layers=layers)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    experts: ExpertsConfig | None
    """None if every layer has a feed-forward part."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Read a config.json of `model_type` qwen3_moe or qwen2_moe."""
        dense = Qwen3Config.from_hf(config)
        if config.get("model_type") == "qwen2_moe":
            dense = replace(dense, qkv_bias=read_value(config, "qkv_bias", bool, True), output_bias=False)
        return cls(**vars(dense), experts=ExpertsConfig.from_hf(config, dense.num_hidden_layers))


class Gate(nnx.Module):
    """Scores `x W^T` by a small `weight [N, D]`, which stays float32 in models of any precision.

    A rounded score can choose another expert, and the weight is a thousandth of those that it decides about.
    """

    keeps_floats: ClassVar[bool] = True
    """True for weights that become floats where the checkpoint has them quantised, as AutoRound's have."""

    def __init__(self, size_in: int, size_out: int, *, rngs: nnx.Rngs):
        self.weight = Linear(size_in, size_out, dtype=jnp.float32, rngs=rngs).weight

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B N"]:
        return ops.linear(x, self.weight[...])


class Router(Gate):
    """Choice of k experts for each token, and their weights: the largest probabilities over all experts."""

    def __init__(self, config: Qwen3Config, experts: ExpertsConfig, *, rngs: nnx.Rngs):
        super().__init__(config.hidden_size, experts.num_experts, rngs=rngs)
        self.k = experts.num_experts_per_tok
        self.normalised = experts.norm_topk_prob

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Array, "*B D"]
    ) -> tuple[Float[Array, "*B E"], Float[Array, "*B k"], Int[Array, "*B k"]]:
        scores = self.scores(x)
        weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), self.k)
        if self.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return scores, weights, experts

    def scores(self, x: Float[Array, "*B D"]) -> Float[Array, "*B E"]:
        """Score of each expert."""
        return super().__call__(x)


class Experts(nnx.Module):
    """SwiGLU feed-forward parts, of which each token passes k; two stacks `[E, out, in]`.

    Each of several devices has some of the experts (expert parallelism): it adds up what they give to all tokens.
    """

    divisions = MappingProxyType({"gate_up_proj": Division(), "down_proj": Division()})
    """Division of each divided parameter."""

    def __init__(self, config: Qwen3Config, experts: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F, E = config.hidden_size, experts.moe_intermediate_size, experts.num_experts
        self.gate_up_proj = nnx.Param(Linear(D, E * 2 * F, dtype=dtype, rngs=rngs).weight[...].reshape(E, 2 * F, D))
        self.down_proj = nnx.Param(Linear(F, E * D, dtype=dtype, rngs=rngs).weight[...].reshape(E, D, F))

    def __call__(
        self, x: Float[Array, "*B D"], experts: Int[Array, "*B k"], weights: Float[Array, "*B k"]
    ) -> Float[Array, "*B D"]:
        gate_up, down = self.gate_up_proj.get_value(), self.down_proj.get_value()
        experts = experts - part_index() * gate_up.shape[0]  # experts of other devices are out of range, and give zeros
        y = self.gated(ops.grouped_linear(x[..., None, :], gate_up, experts))
        y = ops.grouped_linear(y, down, experts)
        return sum_parts(jnp.sum(y * weights[..., None], axis=-2))

    def gated(self, y: Float[Array, "*B E"]) -> Float[Array, "*B F"]:
        """Gate times input, out of both."""
        gate, up = jnp.split(y, 2, axis=-1)
        return jax.nn.silu(gate) * up


class SparseMoeBlock(nnx.Module):
    """Router and experts of a layer and, in Qwen2-MoE, Qwen3-Next and Qwen3.5, a gated expert that all tokens pass."""

    def __init__(self, config: Qwen3Config, experts: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate = Router(config, experts, rngs=rngs)
        self.experts = Experts(config, experts, dtype=dtype, rngs=rngs)
        shared = replace(config, intermediate_size=experts.shared_expert_intermediate_size)
        self.shared_expert = MLP(shared, dtype=dtype, rngs=rngs) if shared.intermediate_size else None
        self.shared_expert_gate = Gate(config.hidden_size, 1, rngs=rngs) if shared.intermediate_size else None

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Map the last axis."""
        _, weights, experts = self.gate(x)
        y = self.experts(x, experts, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward or experts, each on a normalised copy of the residual stream."""

    def feed_forward(self, config: Any, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
        """Experts of a sparse layer; feed-forward part of another."""
        if config.experts is None or layer not in config.experts.layers:
            return MLP(config, dtype=dtype, rngs=rngs)
        return SparseMoeBlock(config, config.experts, dtype=dtype, rngs=rngs)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with experts in its sparse layers."""

    layer_class = DecoderLayer

    stacked_weights = STACKED_EXPERTS
    """(pattern, replacements) pairs of stacks and of the keys that published checkpoints have them as."""
