"""One file per architecture; here, which one a checkpoint's config.json asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from verax.errors import UnsupportedModelError
from verax.fields import read_value
from verax.models.bert import BertConfig, BertModel
from verax.models.lam import LamConfig, LamModel
from verax.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from verax.models.qwen3_5 import DeltaState, Qwen35Config, Qwen35ForCausalLM
from verax.models.token_mixers import AttentionFn, RecurrentLayer, RunRecurrent

__all__ = [
    "DTYPES",
    "AttentionFn",
    "BertConfig",
    "BertModel",
    "DeltaState",
    "LamConfig",
    "LamModel",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen35Config",
    "Qwen35ForCausalLM",
    "RecurrentLayer",
    "RunRecurrent",
    "causal_lm",
    "encoder",
]

DTYPES: dict[str, DTypeLike] = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
"""What engines run models in: the dtype of weights and of matmul inputs. The rest is float32 in both."""

_CAUSAL_LM = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen2": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3_5": (Qwen35ForCausalLM, Qwen35Config),
    "qwen3_5_text": (Qwen35ForCausalLM, Qwen35Config),
    "qwen3_next": (Qwen35ForCausalLM, Qwen35Config),
}

_ENCODERS: dict[str, tuple[Any, Any]] = {"bert": (BertModel, BertConfig), "lam": (LamModel, LamConfig)}


def causal_lm(config: Mapping[str, Any]) -> tuple[type[Qwen3ForCausalLM], Qwen3Config]:
    """The model class and its configuration for a config.json that describes a language model.

    Raises:
        UnsupportedModelError: for a `model_type` that verax does not have, naming those that it has.
    """
    kind = read_value(config, "model_type", str, None)
    if kind not in _CAUSAL_LM:
        known = ", ".join(_CAUSAL_LM)
        raise UnsupportedModelError(f"config.json has model_type {kind!r}; language models supported are {known}")
    model, read = _CAUSAL_LM[kind]
    return model, read.from_hf(config)


def encoder(config: Mapping[str, Any]) -> tuple[type[BertModel], BertConfig] | tuple[type[LamModel], LamConfig]:
    """The model class and its configuration for a config.json that describes a text encoder.

    Its instances are called with `tokens [B, T]` and `lengths [B]` and give hidden states.

    Raises:
        UnsupportedModelError: for a `model_type` that verax does not have, naming those that it has.
    """
    kind = read_value(config, "model_type", str, None)
    if kind not in _ENCODERS:
        known = ", ".join(_ENCODERS)
        raise UnsupportedModelError(f"config.json has model_type {kind!r}; text encoders supported are {known}")
    model, read = _ENCODERS[kind]
    return model, read.from_hf(config)
