"""Settings of encoders and rerankers, from sentence-transformers' files in a folder: length, case, prompts.

`sentence_bert_config.json` describes the tokens, and `config_sentence_transformers.json` prompts and what is done with
the results. The modules after the transformer are read in `modules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import JsonObject, read_json

_DOCUMENT = ("document", "passage", "corpus")
"""Names of the prompt of documents, the preferred first: sentence-transformers'."""

MODEL_FILE = "config_sentence_transformers.json"
_TRANSFORMER_FILES = [
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]

TOKEN_MODELS = ("MultiVectorEncoder", "ColBERT")
"""Kinds of models of token vectors: sentence-transformers' and PyLate's."""

SPARSE_MODEL = "SparseEncoder"
"""Kind of models of sparse vectors: sentence-transformers' name."""

LATE_INTERACTION = ("query_length", "document_length", "query_expansion")
"""Keys of the transformer's file that only token vectors have."""

_REFUSED = ("processing_kwargs", "tokenizer_args", "config_args", "processor_kwargs", "config_kwargs")
"""Keys of the transformer's file that change its inputs or what it computes."""

_LOADING = {"attn_implementation", "cache_dir", "device_map", "dtype", "low_cpu_mem_usage", "revision", "torch_dtype"}
_LOADING |= {"token", "trust_remote_code", "use_safetensors"}
"""Arguments of a model's loading, in `model_args`, that do not change what it computes."""

_TEXT_ONLY = ({}, {"method": "forward", "method_output_name": "last_hidden_state"})
_TEXT_ONLY += ({"method": "forward", "method_output_name": "logits"},)


@dataclass(frozen=True)
class Prompts:
    """Texts that go before sentences, by their names."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    @classmethod
    def from_file(cls, config: JsonObject) -> Prompts:
        """Read them from the content of `config_sentence_transformers.json`."""
        texts = read_value(config, "prompts", dict[str, str | None], {})
        default = read_value(config, "default_prompt_name", str, None)
        if default is not None and default not in (*texts, "query", "document"):
            raise CheckpointError(f"{config.where}: default_prompt_name: there is no prompt {default!r}")
        return cls({name: text or "" for name, text in texts.items()}, default)

    def text(self, name: str | None) -> str:
        """Text of a prompt by its name; of the default one, or none, for None."""
        if name is None:
            return "" if self.default is None else self.texts.get(self.default, "")
        if name not in self.texts:
            known = f"there are {', '.join(self.texts)}" if self.texts else "the checkpoint has none"
            raise InvalidParameterError(f"prompt_name: there is no prompt {name!r}; {known}, and prompt takes a text")
        return self.texts[name]

    @property
    def query(self) -> str:
        """Text that goes before a query."""
        return self.texts.get("query", "")

    @property
    def document(self) -> str:
        """Text that goes before a document that queries look for."""
        return next((self.texts[name] for name in _DOCUMENT if name in self.texts), "")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings by which sentences become vectors."""

    pooling: str
    """Names of `modules.POOLINGS`, with `+` between several."""
    max_length: int
    """Tokens that are read of a sentence, special ones included."""
    lower_case: bool = False
    """True if texts are put in lower case before they are tokenized."""
    prompts: Prompts = field(default_factory=Prompts)
    dimensions: int | None = None
    """Leading dimensions of a vector that are kept by default; all of them if None."""

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        transformer: Path | None = None,
        *,
        positions: int,
        pooling: str = "mean",
        max_length: int | None = None,
    ) -> EncoderSettings:
        """Read a folder. What is given as an argument goes before what the files say.

        `transformer`: folder of its transformer, if that is another. `positions`: tokens that the model can read at
        most.
        """
        config = read_model_file(folder, "SentenceTransformer")
        tokens = read_transformer_file(transformer or folder, "feature-extraction")
        return cls(
            pooling,
            read_max_length(transformer or folder, positions, max_length, tokens),
            lower_case=read_value(tokens, "do_lower_case", bool, False),
            prompts=Prompts.from_file(config),
            dimensions=read_value(config, "truncate_dim", Size, None),
        )


def read_model_file(folder: Path, *kinds: str) -> JsonObject:
    """Content of a folder's `config_sentence_transformers.json`, of a model of these kinds; empty without the file."""
    config = read_json(folder / MODEL_FILE, optional=True)
    if (given := read_value(config, "model_type", str, kinds[0])) not in kinds:
        output = "tokens" if given in TOKEN_MODELS else "sparse" if given == SPARSE_MODEL else None
        hint = f"; Encoder(..., output={output!r}) reads it" if output else ""
        raise UnsupportedModelError(f"{config.where}: model_type {given!r}: expected {' or '.join(kinds)}{hint}")
    return config


def read_transformer_file(folder: Path, task: str, *, tokens: bool = False) -> JsonObject:
    """Content of the file of a transformer's tokens, under any of its names; empty without one.

    `tokens`: True for a model of token vectors, which alone has the keys `LATE_INTERACTION`. Of the task
    "text-generation", how chat templates are rendered is left to the caller.
    """
    present = [name for name in _TRANSFORMER_FILES if (folder / name).is_file()]
    config = read_json(folder / [*present, *_TRANSFORMER_FILES][0], optional=True)
    names = _REFUSED if tokens else (*_REFUSED, *LATE_INTERACTION)
    chats = task == "text-generation"
    names = [name for name in names if not (chats and name == "processing_kwargs")]
    refused: dict[str, Any] = {name: config[name] for name in names if config.get(name)}
    if (given := config.get("transformer_task", task)) != task:
        refused["transformer_task"] = given
    for name in ("model_args", "model_kwargs"):
        refused |= {
            f"{name}.{key}": value for key, value in read_value(config, name, dict, {}).items() if key not in _LOADING
        }
    for modality, how in read_value(config, "modality_config", dict, {}).items():
        if (modality == "message" and not chats) or (modality == "text" and how not in _TEXT_ONLY):
            refused[f"modality_config.{modality}"] = how
    for name, value in refused.items():
        raise UnsupportedModelError(f"{config.where}: {name} {value!r} is not supported")
    return config


def read_max_length(folder: Path, positions: int, max_length: int | None, tokens: Mapping[str, object]) -> int:
    """Tokens that are read of a text: the argument, or the limit of the files, or all positions.

    `positions`: tokens that the model can read at most. `tokens`: content of sentence_bert_config.json.
    """
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int)):
        raise InvalidParameterError(f"max_length: expected a whole number, got {max_length!r}")
    if max_length is not None and not 1 <= max_length <= positions:
        raise InvalidParameterError(f"max_length: expected 1 to the model's {positions} positions, got {max_length}")
    tokenizer = read_json(folder / "tokenizer_config.json", optional=True)
    limits = [
        read_value(tokens, "max_seq_length", float, None),
        # transformers writes 1e30 for "no limit", and wrote max_len once.
        read_value(tokenizer, "model_max_length", float, None),
        read_value(tokenizer, "max_len", float, None),
    ]
    own = next((limit for limit in limits if limit is not None and limit >= 1), positions)
    return max_length or int(min(own, positions))
