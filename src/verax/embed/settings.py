"""Settings of a sentence encoder, from sentence-transformers' files in its folder: pooling, length, case, prompts.

`modules.json` lists the steps in their order, `1_Pooling/config.json` describes the pooling,
`sentence_bert_config.json` the tokens, and `config_sentence_transformers.json` the prompts. A folder with none of them
is pooled by the mean, as sentence-transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verax.checkpoint import Checkpoint
from verax.embed.pooling import POOLINGS
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import read_value
from verax.files import JsonObject, read_json

__all__ = ["EncoderSettings", "open_folder", "read_max_length"]

_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
_STEPS = ("Transformer", "Pooling", "Dense", "Normalize")

_DOCUMENT = ("document", "passage", "corpus")
"""Names of the prompt of documents, the preferred first: sentence-transformers'."""


@dataclass(frozen=True)
class EncoderSettings:
    """Settings by which sentences become vectors."""

    pooling: str
    """`"mean"`, `"cls"` or `"lasttoken"`."""
    max_length: int
    """Tokens that are read of a sentence, special ones included."""
    lower_case: bool = False
    """True if texts are put in lower case before they are tokenized."""
    include_prompt: bool = True
    """False if the tokens of a prompt do not count for the mean."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts by name: texts that go before a sentence."""
    default_prompt_name: str | None = None
    """Name of the prompt that `encode` uses by default."""
    dense: tuple[Path, ...] = ()
    """Folders of the layers after the pooling."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, positions: int, pooling: str | None = None, max_length: int | None = None
    ) -> EncoderSettings:
        """Read a folder. What is given as an argument goes before what the files say.

        Args:
            folder: folder of the checkpoint.
            positions: tokens that the model can read at most.
            pooling: one of `POOLINGS`.
            max_length: tokens that are read of a sentence.

        Raises:
            CheckpointError: if a file is damaged.
            UnsupportedModelError: for another pooling, or another step.
            InvalidParameterError: for an argument that makes no sense.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidParameterError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
        steps = _steps(folder)
        pooled = read_json(folder / steps.get("Pooling", ["1_Pooling"])[0] / "config.json", optional=True)
        named = read_json(folder / "config_sentence_transformers.json", optional=True)
        prompts = read_value(named, "prompts", dict[str, str], {})
        default = read_value(named, "default_prompt_name", str, None)
        if default is not None and default not in prompts:
            raise CheckpointError(f"{named.where}: default_prompt_name: there is no prompt {default!r}")
        tokens = read_json(folder / "sentence_bert_config.json", optional=True)
        return cls(
            pooling or _pooling(pooled),
            read_max_length(folder, positions, max_length, tokens),
            lower_case=read_value(tokens, "do_lower_case", bool, False),
            include_prompt=read_value(pooled, "include_prompt", bool, True),
            prompts=prompts,
            default_prompt_name=default,
            dense=tuple(folder / path for path in steps.get("Dense", ())),
        )

    def prompt(self, prompt_name: str | None) -> str:
        """Text of a prompt by its name; of the default one, or none, for None.

        Raises:
            InvalidParameterError: if there is no such prompt, naming the existing ones.
        """
        name = self.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = f"there are {', '.join(self.prompts)}" if self.prompts else "the checkpoint has none"
            raise InvalidParameterError(f"prompt_name: there is no prompt {name!r}; {known}, and prompt takes a text")
        return self.prompts[name]

    @property
    def query_prompt(self) -> str:
        """Text that goes before a query."""
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """Text that goes before a document that queries look for."""
        return next((self.prompts[name] for name in _DOCUMENT if name in self.prompts), "")


def open_folder(model: str | Path, revision: str | None) -> Checkpoint:
    """Open the checkpoint of an encoder or a reranker.

    Raises:
        CheckpointError: if it is missing or damaged.
        UnsupportedModelError: if it is a GGUF file.
    """
    opened = Checkpoint.open(model, revision=revision)
    if opened.folder.is_file():
        raise UnsupportedModelError(
            f"{opened.folder}: encoders and rerankers are read from folders with config.json and safetensors"
        )
    return opened


def read_max_length(folder: Path, positions: int, max_length: int | None, tokens: Mapping[str, object]) -> int:
    """Tokens that are read of a text: the argument, or the limit of the files, or all positions.

    Args:
        folder: folder of the checkpoint.
        positions: tokens that the model can read at most.
        max_length: the limit that the caller asks for.
        tokens: content of sentence_bert_config.json.

    Raises:
        CheckpointError: if a file is damaged.
        InvalidParameterError: if `max_length` makes no sense.
    """
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int)):
        raise InvalidParameterError(f"max_length: expected a whole number, got {max_length!r}")
    if max_length is not None and not 1 <= max_length <= positions:
        raise InvalidParameterError(f"max_length: expected 1 to the model's {positions} positions, got {max_length}")
    limits = [
        read_value(tokens, "max_seq_length", float, None),
        # transformers writes 1e30 for "no limit".
        read_value(read_json(folder / "tokenizer_config.json", optional=True), "model_max_length", float, None),
    ]
    own = next((limit for limit in limits if limit is not None and limit >= 1), positions)
    return max_length or int(min(own, positions))


def _pooling(config: JsonObject) -> str:
    """Pooling of a configuration file; the mean if it names none."""
    # Newer files have one name, older ones a flag for each.
    given: list[str] = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    if name := read_value(config, "pooling_mode", str, ""):
        given = [name]
    modes = [_MODES.get(mode, mode) for mode in given] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{config.where}: pooling by {' and '.join(modes)} is not supported; {', '.join(POOLINGS)} are, and can be "
            "asked for with the option pooling"
        )
    return modes[0]


def _steps(folder: Path) -> dict[str, list[str]]:
    """Folders of the steps of modules.json by the last part of their type; empty without such a file."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    steps: dict[str, list[str]] = {}
    for module in read_json(path, kind=list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: expected steps with a type and a path, got {module!r}")
        subfolder = read_value(JsonObject(module, path), "path", str, "")
        if "\0" in subfolder:
            raise CheckpointError(f"{path}: {subfolder!r} is not a path")
        steps.setdefault(module["type"].rpartition(".")[2], []).append(subfolder)
    unknown = [step for step in steps if step not in _STEPS]
    if unknown:
        raise UnsupportedModelError(f"{path}: {', '.join(unknown)} is not supported; {', '.join(_STEPS)} are")
    return steps
