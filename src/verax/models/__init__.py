"""One file per architecture. Here: the table of architectures by `model_type` of config.json."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Count, Size, file_of, read_value
from verax.files import JsonObject
from verax.models import (
    bert,
    deberta,
    gemma3,
    gemma4,
    gpt_oss,
    granite,
    jina_bert,
    lam,
    ministral3,
    modernbert,
    olmo2,
    phi3,
    qwen3,
    qwen3_5,
    qwen3_moe,
    rotary_bert,
    smollm3,
)
from verax.models.causal_lm import (
    AttentionFn,
    CausalLM,
    CausalLMConfig,
    CausalLMForSequenceClassification,
    DividedStateConfig,
    RecurrentConfig,
    RecurrentLayer,
    RunRecurrent,
    SlidingWindowConfig,
    causal_attention,
    check_causal_lm_class,
    final_hidden_states,
    run_from_zeros,
    text_config,
)
from verax.models.video_model import VideoModel
from verax.models.wan.family import WanVideoModel
from verax.nn import Sentences

__all__ = [
    "DTYPES",
    "AttentionFn",
    "CausalLM",
    "CausalLMConfig",
    "DividedStateConfig",
    "RecurrentConfig",
    "RecurrentLayer",
    "RunRecurrent",
    "SlidingWindowConfig",
    "VideoModel",
    "causal_attention",
    "causal_lm",
    "check_dtype",
    "cross_encoder",
    "encoder",
    "hidden_states",
    "language_config",
    "masked_lm",
    "register_causal_lm",
    "register_video_model",
    "video_model",
]

DTYPES: dict[str, DTypeLike] = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
"""Dtypes of weights and of matmul inputs that engines run models in. The rest is float32 in both."""

_CAUSAL_LM: dict[str, tuple[type[Any], type[Any]]] = {
    **dict.fromkeys(
        ("qwen3", "qwen2", "llama", "mistral", "ministral", "qwen3_vl", "qwen3_vl_text"),
        (qwen3.Qwen3ForCausalLM, qwen3.Qwen3Config),
    ),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe"), (qwen3_moe.Qwen3MoeForCausalLM, qwen3_moe.Qwen3MoeConfig)),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        (qwen3_5.Qwen35ForCausalLM, qwen3_5.Qwen35Config),
    ),
    **dict.fromkeys(("gemma3", "gemma3_text", "gemma2"), (gemma3.Gemma3ForCausalLM, gemma3.Gemma3Config)),
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        (gemma4.Gemma4ForCausalLM, gemma4.Gemma4Config),
    ),
    "gpt_oss": (gpt_oss.GptOssForCausalLM, gpt_oss.GptOssConfig),
    "phi3": (phi3.Phi3ForCausalLM, phi3.Phi3Config),
    "smollm3": (smollm3.SmolLM3ForCausalLM, smollm3.SmolLM3Config),
    **dict.fromkeys(("olmo2", "olmo3"), (olmo2.Olmo2ForCausalLM, olmo2.Olmo2Config)),
    "granite": (granite.GraniteForCausalLM, granite.GraniteConfig),
    "granitemoehybrid": (granite.GraniteMoeHybridForCausalLM, granite.GraniteConfig),
    **dict.fromkeys(("ministral3", "mistral3"), (ministral3.Ministral3ForCausalLM, ministral3.Ministral3Config)),
}

_ENCODERS: dict[str, tuple[type[Any], type[Any]]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (bert.BertModel, bert.BertConfig)),
    "electra": (bert.ElectraModel, bert.BertConfig),
    "deberta-v2": (deberta.DebertaModel, deberta.DebertaConfig),
    "mpnet": (bert.MPNetModel, bert.BertConfig),
    "distilbert": (bert.DistilBertModel, bert.BertConfig),
    "modernbert": (modernbert.ModernBertModel, modernbert.ModernBertConfig),
    "nomic_bert": (rotary_bert.NomicBertModel, rotary_bert.NomicBertConfig),
    **dict.fromkeys(("gte", "new"), (rotary_bert.GteModel, rotary_bert.GteConfig)),
    "jina_embeddings_v3": (rotary_bert.JinaV3Model, rotary_bert.JinaV3Config),
    "jina_bert": (jina_bert.JinaBertModel, jina_bert.JinaBertConfig),
    "eurobert": (qwen3.Qwen3ForCausalLM, qwen3.Qwen3Config),
    "lam": (lam.LamModel, lam.LamConfig),
}

_BY_POSITIONS = {("bert", "alibi"): "jina_bert", ("xlm-roberta", "rotary"): "jina_embeddings_v3"}
"""Names of Jina's encoders, whose files have another family's `model_type`, by it and `position_embedding_type`."""

_CROSS_ENCODERS: dict[str, tuple[type[Any], type[Any]]] = {
    "bert": (bert.BertForSequenceClassification, bert.BertConfig),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), (bert.RobertaForSequenceClassification, bert.BertConfig)),
    "electra": (bert.ElectraForSequenceClassification, bert.BertConfig),
    "modernbert": (modernbert.ModernBertForSequenceClassification, modernbert.ModernBertConfig),
    "deberta-v2": (deberta.DebertaForSequenceClassification, deberta.DebertaConfig),
    **dict.fromkeys(("gte", "new"), (rotary_bert.GteForSequenceClassification, rotary_bert.GteConfig)),
}

_MASKED_LMS: dict[str, tuple[type[Any], type[Any]]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (bert.BertForMaskedLM, bert.BertConfig)),
    "modernbert": (modernbert.ModernBertForMaskedLM, modernbert.ModernBertConfig),
    "mpnet": (bert.MPNetForMaskedLM, bert.BertConfig),
    "distilbert": (bert.DistilBertForMaskedLM, bert.BertConfig),
}

_VIDEO_MODELS: dict[str, type[Any]] = {
    "WanModel": WanVideoModel,
    "VaceWanModel": WanVideoModel,
    "SkyReelsV2Transformer3DModel": WanVideoModel,
    "WanTransformer3DModel": WanVideoModel,
    "WanVACETransformer3DModel": WanVideoModel,
}
"""Families of video models by the `_class_name` of a transformer's config.json."""


def check_dtype(dtype: str) -> None:
    """Check the name of a dtype that models run in.

    Raises:
        InvalidParameterError: if it is not in `DTYPES`.
    """
    if dtype not in DTYPES:
        raise InvalidParameterError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")


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
    taken = _CAUSAL_LM.setdefault(model_type, (model, config))
    if taken != (model, config):
        raise InvalidParameterError(f"model_type: {model_type!r} is the name of {taken[0].__name__} already")


def causal_lm(config: Mapping[str, Any], *, prediction_head: bool = False) -> tuple[type[Any], Any]:
    """The model class (a `CausalLM`) and its configuration (a `CausalLMConfig`) for a language model's config.json.

    `prediction_head`: the model with its head of multi-token prediction.

    Raises:
        UnsupportedModelError: for a `model_type` that is not in the table, naming those that are, or for a model
            without such a head.
    """
    kind = _kind(config, "model_type", _CAUSAL_LM, "language models", "; verax.register_causal_lm adds others")
    if not is_causal(config):
        raise UnsupportedModelError(
            f"{file_of(config)}: is_causal or use_bidirectional_attention: its tokens attend to those after them; that "
            "is an encoder, which generates no text"
        )
    model, read = _CAUSAL_LM[kind]
    sizes = read.from_hf(config)
    return model, replace(sizes, num_nextn_predict_layers=_prediction_layers(config)) if prediction_head else sizes


def _prediction_layers(config: Mapping[str, Any]) -> int:
    """Layers of a model's head of multi-token prediction, by its config.json; Qwen3-Next's has no key for them."""
    text = text_config(config)
    default = read_value(text, "num_nextn_predict_layers", Count, int(text.get("model_type") == "qwen3_next"))
    layers = read_value(text, "mtp_num_hidden_layers", Count, default)
    if layers != 1 or read_value(text, "mtp_use_dedicated_embeddings", bool, False):
        raise UnsupportedModelError(
            f"{file_of(config)}: expected a head of multi-token prediction with one layer and the model's embeddings "
            f"(num_nextn_predict_layers or mtp_num_hidden_layers 1), got {layers or 'none'}"
        )
    return layers


_LANGUAGE_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Classes of transformers, by the `model_type` of the language model in a file of a model with a vision tower."""


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the language model alone, whose keys have no level for it; a copy, of one without a `text_config`.

    Raises:
        UnsupportedModelError: for a language model whose class in transformers is not known.
    """
    part = read_value(config, "text_config", dict, None)
    if part is None:
        return dict(config)
    outer = read_value(config, "model_type", str)
    kind = read_value(part, "model_type", str, "mistral" if outer == "mistral3" else f"{outer}_text")
    if kind == "qwen3_vl_text":  # a Qwen3, whose tokens have one position each where there are no images
        kind, part = "qwen3", {name: _without_axes(value) for name, value in part.items()}
    if kind not in _LANGUAGE_MODELS:
        raise UnsupportedModelError(f"{file_of(config)}: its language model, {kind!r}, cannot be written by itself")
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    kept = {name: config[name] for name in shared if name in config}
    return {**part, **kept, "model_type": kind, "architectures": [_LANGUAGE_MODELS[kind]]}


def _without_axes(value: Any) -> Any:
    """A value of a config.json, without the axes that rotary settings have for images."""
    return {k: v for k, v in value.items() if not k.startswith("mrope_")} if isinstance(value, dict) else value


def is_causal(config: Mapping[str, Any]) -> bool:
    """False for a language model whose tokens see those after them: an encoder, by its config.json."""
    text = JsonObject(read_value(config, "text_config", dict, None) or config, file_of(config))
    both = read_value(text, "use_bidirectional_attention", bool | Literal["all", "vision"], False)
    default = text.get("model_type") != "eurobert"  # a Llama otherwise
    return read_value(text, "is_causal", bool, default) and both in (False, "vision")  # which is of images' tokens


def _causal(config: Mapping[str, Any]) -> JsonObject:
    """config.json of the causal language model with the weights of one whose tokens see those after them."""
    changed = {name: value for name, value in config.items() if name != "is_causal"}
    if isinstance(part := config.get("text_config"), dict):
        changed["text_config"] = dict(_causal(part))
    if changed.pop("use_bidirectional_attention", False):
        # Half of the window on each side, the token itself not counted.
        changed["sliding_window"] = max(read_value(config, "sliding_window", Size, 4096) // 2, 1)
    return JsonObject(changed, file_of(config))


def encoder(config: Mapping[str, Any]) -> tuple[type[Any], Any]:
    """The model class and its configuration for a config.json that describes a text encoder or a language model.

    A language model has no head of its own here: `hidden_states` calls either kind.

    Raises:
        UnsupportedModelError: for a `model_type` that verax does not have, naming those that it has, or for a language
            model of the checkpoint's own code that does not say in which directions tokens attend.
    """
    kind = _kind(config, "model_type", (*_ENCODERS, *_CAUSAL_LM), "text encoders")
    if kind in _CAUSAL_LM:
        code = read_value(config, "auto_map", dict, {}).get("AutoModel")
        if code and not {"is_causal", "use_bidirectional_attention"} & {*config}:  # gte-Qwen2's attends both ways
            raise UnsupportedModelError(
                f"{file_of(config)}: auto_map: {code} is the checkpoint's own code, which is not run; add is_causal "
                "true, or false if its tokens attend to those after them"
            )
        model, sizes = causal_lm(config if is_causal(config) else _causal(config))
    else:
        model, read = _ENCODERS[_BY_POSITIONS.get((kind, str(config.get("position_embedding_type"))), kind)]
        sizes = read.from_hf(config)
    # Without its head, which encoders do not call.
    return model, sizes if getattr(sizes, "tie_word_embeddings", True) else replace(sizes, tie_word_embeddings=True)


def hidden_states(
    model: Any,
    tokens: Int[Array, "B T"],
    sentences: Sentences,
    types: Int[Array, "B T"] | None = None,
    *,
    causal: bool = True,
) -> Float[Array, "B T D"]:
    """Final hidden states of sentences; states of padding mean nothing.

    Args:
        model: an instance of a class that `encoder` gives.
        tokens: token ids.
        sentences: where the sentences lie. They may be packed unless the model's `takes_packed_sentences` is False.
        types: token types of pairs, for encoders that have them; all 0 if None.
        causal: False for a language model whose tokens see those after them, see `is_causal`.
    """
    if isinstance(model, lam.LamModel):
        return model(tokens, sentences.lengths)
    if isinstance(model, CausalLM):
        attend = causal_attention(model.dtype, sentences.segments, causal=causal)
        return final_hidden_states(model, tokens, sentences.positions, attend, run_from_zeros(sentences.cu_seqlens))
    return model(tokens, sentences, types)


def cross_encoder(config: Mapping[str, Any]) -> tuple[type[Any], Any]:
    """The model class and its configuration for a config.json that describes a classifier of text pairs.

    Its instances are called with `tokens [B, T]`, `Sentences` and `types [B, T]`, and give a logit for each pair.

    Raises:
        UnsupportedModelError: for another `model_type`, naming those that verax has, or for several labels.
    """
    kind = _kind(config, "model_type", (*_CROSS_ENCODERS, *_CAUSAL_LM), "cross-encoders")
    # transformers' own default is two labels.
    labels = len(read_value(config, "id2label", dict, {})) or read_value(config, "num_labels", Size, 2)
    if labels != 1:
        raise UnsupportedModelError(f"a classifier of {labels} labels ranks nothing; a reranker has one label")
    if kind in _CAUSAL_LM:
        model, sizes = encoder(config)
        padding = read_value(text_config(config), "pad_token_id", Count, None)
        options = {"language_model": model, "causal": is_causal(config), "padding": padding}
        options["ignored_weights"] = model.ignored_weights
        return type(model.__name__, (CausalLMForSequenceClassification,), options), sizes
    model, read = _CROSS_ENCODERS[kind]
    return model, read.from_hf(config)


def masked_lm(config: Mapping[str, Any]) -> tuple[type[Any], Any]:
    """The model class and its configuration for a config.json that describes an encoder with its masked-LM head.

    Its instances are called as encoders, and give logits of the vocabulary `[B, T, V]` at each token.

    Raises:
        UnsupportedModelError: for another `model_type`, naming those that verax has.
    """
    kind = _kind(config, "model_type", _MASKED_LMS, "masked language models")
    model, read = _MASKED_LMS[kind]
    return model, read.from_hf(config)


def register_video_model(class_name: str, model: Any) -> None:
    """Add a family of video models: `VideoPipeline(folder)` then opens folders whose transformer has this class name.

    Args:
        class_name: `_class_name` in the config.json of the folder's transformer.
        model: a subclass of `VideoModel`.

    Raises:
        InvalidParameterError: if the name belongs to another family, or for another class.
    """
    is_family = inspect.isclass(model) and issubclass(model, VideoModel)
    if not is_family or inspect.isabstract(model) or not hasattr(model, "references"):
        raise InvalidParameterError(
            f"model: expected a subclass of verax.models.VideoModel with references and from_folder, got {model!r}"
        )
    if (taken := _VIDEO_MODELS.setdefault(class_name, model)) is not model:
        raise InvalidParameterError(f"class_name: {class_name!r} is the name of {taken.__name__} already")


def video_model(config: Mapping[str, Any]) -> type[Any]:
    """Class of a family of video models (a `VideoModel`) for a transformer's config.json.

    Raises:
        UnsupportedModelError: for a `_class_name` that is not in the table, naming those that are.
    """
    named = {"_class_name": "WanModel", **config}  # the originals' smaller files have no name
    return _VIDEO_MODELS[
        _kind(named, "_class_name", _VIDEO_MODELS, "transformers", "; verax.register_video_model adds others")
    ]


def _kind(config: Mapping[str, Any], key: str, known: Collection[str], what: str, hint: str = "") -> str:
    """Kind of a model in a config.json, which has to be one of those known."""
    if (kind := read_value(config, key, str, None)) not in known:
        nearest = difflib.get_close_matches(str(kind), known, n=3, cutoff=0)
        raise UnsupportedModelError(
            f"config.json has {key} {kind!r}; {what} supported are {', '.join(known)}, of which "
            f"{', '.join(nearest)} have the nearest names{hint}"
        )
    return kind
