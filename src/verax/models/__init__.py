"""One file per architecture. Here: the table of architectures by `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import read_value
from verax.models.bert import BertConfig, BertModel
from verax.models.causal_lm import (
    CausalLM,
    CausalLMConfig,
    RecurrentConfig,
    SlidingWindowConfig,
    check_causal_lm_class,
)
from verax.models.gemma3 import Gemma3Config, Gemma3ForCausalLM
from verax.models.lam import LamConfig, LamModel
from verax.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from verax.models.qwen3_5 import DeltaState, Qwen35Config, Qwen35ForCausalLM
from verax.models.token_mixers import AttentionFn, RecurrentLayer, RunRecurrent, causal_attention

__all__ = [
    "DTYPES",
    "AttentionFn",
    "BertConfig",
    "BertModel",
    "CausalLM",
    "CausalLMConfig",
    "DeltaState",
    "Gemma3Config",
    "Gemma3ForCausalLM",
    "LamConfig",
    "LamModel",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen35Config",
    "Qwen35ForCausalLM",
    "RecurrentConfig",
    "RecurrentLayer",
    "RunRecurrent",
    "SlidingWindowConfig",
    "causal_attention",
    "causal_lm",
    "encoder",
    "register_causal_lm",
]

DTYPES: dict[str, DTypeLike] = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
"""Dtypes of weights and of matmul inputs that engines run models in. The rest is float32 in both."""

_CAUSAL_LM: dict[str, tuple[type[Any], type[Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen2": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3_5": (Qwen35ForCausalLM, Qwen35Config),
    "qwen3_5_text": (Qwen35ForCausalLM, Qwen35Config),
    "qwen3_next": (Qwen35ForCausalLM, Qwen35Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3Config),
    "gemma3_text": (Gemma3ForCausalLM, Gemma3Config),
    "gemma2": (Gemma3ForCausalLM, Gemma3Config),
}

_ENCODERS: dict[str, tuple[Any, Any]] = {"bert": (BertModel, BertConfig), "lam": (LamModel, LamConfig)}


def register_causal_lm(model_type: str, model: Any, config: Any) -> None:
    """Add a language model: `LLM(folder)` then serves checkpoints whose config.json has this `model_type`.

    Examples:
        >>> verax.register_causal_lm("gpt2", GPT2LMHeadModel, GPT2Config)
        >>> verax.LLM("path/to/gpt2").generate("Once upon a time")

    Args:
        model_type: the key in config.json.
        model: a class that satisfies `CausalLM`; its instances' paths are the keys of the checkpoint.
        config: a class that satisfies `CausalLMConfig`.

    Raises:
        InvalidParameterError: if the name belongs to another model, or a class lacks a member, with the member's name.
    """
    check_causal_lm_class(model, config)
    taken = _CAUSAL_LM.get(model_type)
    if taken is not None and taken != (model, config):
        raise InvalidParameterError(f"model_type: {model_type!r} is the name of {taken[0].__name__} already")
    _CAUSAL_LM[model_type] = model, config


def causal_lm(config: Mapping[str, Any]) -> tuple[type[Any], Any]:
    """The model class (a `CausalLM`) and its configuration (a `CausalLMConfig`) for a language model's config.json.

    Raises:
        UnsupportedModelError: for a `model_type` that is not in the table, naming those that are.
    """
    kind = read_value(config, "model_type", str, None)
    if kind not in _CAUSAL_LM:
        known = ", ".join(_CAUSAL_LM)
        raise UnsupportedModelError(
            f"config.json has model_type {kind!r}; language models supported are {known}; "
            "verax.register_causal_lm adds others"
        )
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
