"""Settings of an encoder from sentence-transformers' files in a checkpoint's folder: pooling, length, case.

`modules.json` lists the steps in their order, `1_Pooling/config.json` describes the pooling, and
`sentence_bert_config.json` the tokens. Without these files the mean is taken, as in sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verax.checkpoint.checkpoint import read_json
from verax.embed.pooling import POOLINGS
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

__all__ = ["EncoderSettings"]

_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings for turning sentences into vectors."""

    pooling: str
    """Name of the pooling: `"mean"` or `"cls"`."""
    max_length: int
    """Most tokens of a sentence, special ones included; the rest is cut off."""
    lower_case: bool = False
    """True if texts are put in lower case before tokenization."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, positions: int, pooling: str | None = None, max_length: int | None = None
    ) -> EncoderSettings:
        """Read the settings of a folder. Arguments take precedence over its files.

        Args:
            folder: folder of the checkpoint.
            positions: number of the model's positions, the upper limit of `max_length`.
            pooling: `"mean"` or `"cls"`; that of the files if None.
            max_length: most tokens of a sentence; that of the files if None.

        Raises:
            CheckpointError: if a file is damaged.
            UnsupportedModelError: for another pooling, or another step.
            InvalidParameterError: for an unknown `pooling`, or a `max_length` that is out of range.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise InvalidParameterError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
        if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int)):
            raise InvalidParameterError(f"max_length: expected a whole number, got {max_length!r}")
        if max_length is not None and not 1 <= max_length <= positions:
            raise InvalidParameterError(
                f"max_length: expected 1 to the model's {positions} positions, got {max_length}"
            )
        tokens = _optional_json(folder / "sentence_bert_config.json")
        # transformers writes 1e30 for "no limit".
        known = [tokens.get("max_seq_length"), _optional_json(folder / "tokenizer_config.json").get("model_max_length")]
        own = next((int(limit) for limit in known if isinstance(limit, int | float) and limit >= 1), positions)
        return cls(
            pooling or _pooling(folder), max_length or min(own, positions), lower_case=bool(tokens.get("do_lower_case"))
        )


def _pooling(folder: Path) -> str:
    """Name of the pooling by the folder's files; the mean if there are none."""
    listed = folder / "modules.json"
    if not listed.is_file():
        path = folder / "1_Pooling"
    else:
        steps = _steps(listed)
        path = folder / steps["Pooling"] if "Pooling" in steps else folder / "1_Pooling"
    config = _optional_json(path / "config.json")
    given = config.get("pooling_mode")  # newer files have one name, older ones a flag for each
    modes = [given] if given else [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    modes = [_MODES.get(mode, mode) for mode in modes] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: pooling by {' and '.join(modes)} is not supported; {' or '.join(POOLINGS)} is, "
            "and can be asked for with the option pooling"
        )
    return modes[0]


def _steps(path: Path) -> dict[str, str]:
    """Folders of the steps of modules.json, by the last part of each step's type."""
    steps = {}
    for module in read_json(path, kind=list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{path}: expected steps with a type and a path, got {module!r}")
        steps[module["type"].rpartition(".")[2]] = module.get("path", "")
    unknown = [step for step in steps if step not in _STEPS]
    if unknown:
        raise UnsupportedModelError(f"{path}: {', '.join(unknown)} is not supported; {', '.join(_STEPS)} are")
    return steps


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
