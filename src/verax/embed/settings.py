"""Settings of a sentence encoder, from sentence-transformers' files in its folder: pooling, length, case.

`modules.json` lists the steps in their order, `1_Pooling/config.json` describes the pooling, and
`sentence_bert_config.json` the tokens. A folder with none of them is pooled by the mean, as sentence-transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verax.embed.pooling import POOLINGS
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import read_value
from verax.files import JsonObject, read_json

__all__ = ["EncoderSettings"]

_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings by which sentences become vectors."""

    pooling: str
    """`"mean"` or `"cls"`."""
    max_length: int
    """Tokens that are read of a sentence, special ones included."""
    lower_case: bool = False
    """True if texts are put in lower case before they are tokenized."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, positions: int, pooling: str | None = None, max_length: int | None = None
    ) -> EncoderSettings:
        """Read a folder. What is given as an argument goes before what the files say.

        Args:
            folder: the checkpoint's.
            positions: tokens that the model can read at most.
            pooling: `"mean"` or `"cls"`.
            max_length: tokens that are read of a sentence.

        Raises:
            CheckpointError: if a file is damaged.
            UnsupportedModelError: for another pooling, or another step.
            InvalidParameterError: for an argument that makes no sense.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidParameterError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
        if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int)):
            raise InvalidParameterError(f"max_length: expected a whole number, got {max_length!r}")
        if max_length is not None and not 1 <= max_length <= positions:
            raise InvalidParameterError(
                f"max_length: expected 1 to the model's {positions} positions, got {max_length}"
            )
        tokens = read_json(folder / "sentence_bert_config.json", optional=True)
        limits = [
            read_value(tokens, "max_seq_length", float, None),
            # transformers writes 1e30 for "no limit".
            read_value(read_json(folder / "tokenizer_config.json", optional=True), "model_max_length", float, None),
        ]
        own = next((limit for limit in limits if limit is not None and limit >= 1), positions)
        return cls(
            pooling or _pooling(folder),
            max_length or int(min(own, positions)),
            lower_case=read_value(tokens, "do_lower_case", bool, False),
        )


def _pooling(folder: Path) -> str:
    """Pooling of the files, or the mean if there are none."""
    listed = folder / "modules.json"
    if not listed.is_file():
        path = folder / "1_Pooling"
    else:
        steps = _steps(listed)
        path = folder / steps["Pooling"] if "Pooling" in steps else folder / "1_Pooling"
    config = read_json(path / "config.json", optional=True)
    # Newer files have one name, older ones a flag for each.
    given: list[str] = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    if name := read_value(config, "pooling_mode", str, ""):
        given = [name]
    modes = [_MODES.get(mode, mode) for mode in given] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: pooling by {' and '.join(modes)} is not supported; {' or '.join(POOLINGS)} is, "
            "and can be asked for with the option pooling"
        )
    return modes[0]


def _steps(path: Path) -> dict[str, str]:
    """Folder of each step of modules.json, by the last part of its type."""
    steps = {}
    for module in read_json(path, kind=list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: expected steps with a type and a path, got {module!r}")
        subfolder = read_value(JsonObject(module, path), "path", str, "")
        if "\0" in subfolder:
            raise CheckpointError(f"{path}: {subfolder!r} is no path")
        steps[module["type"].rpartition(".")[2]] = subfolder
    unknown = [step for step in steps if step not in _STEPS]
    if unknown:
        raise UnsupportedModelError(f"{path}: {', '.join(unknown)} is not supported; {', '.join(_STEPS)} are")
    return steps
