"""A folder's tokenizer.json, as every engine reads it."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from verax.errors import CheckpointError

__all__ = ["read_tokenizer"]


def read_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """Read `folder/tokenizer.json`.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; transformers' AutoTokenizer.from_pretrained(...).save_pretrained writes one"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a valid tokenizer, download it again: {error}") from error
