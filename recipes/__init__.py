"""How the built-in models were trained; not part of the wheel.

`python -m recipes.text`, `python -m recipes.encoder` and `python -m recipes.video` run from a checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from verax.files import write_json


def parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """Parser of a recipe's options, whose default output folder is `output`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument(
        "-o", "--output", type=Path, default=Path(output), help="folder for states, logs, plots, model"
    )
    options.add_argument("--steps", type=int, help="length of the schedules; the recipe's own if left out")
    options.add_argument("--seed", type=int, default=0, help="seed of data, noise, tokenizer and initial weights")
    options.add_argument("--resume", action="store_true", help="continue from the states in the output folder")
    return options


def parse(description: str | None, output: str) -> dict[str, Any]:
    """Options of a recipe that has no options of its own, as arguments of its function."""
    return vars(parser(description, output).parse_args())


def print_measurements(values: Mapping[str, float]) -> None:
    """Print one line a measurement, its name in words."""
    for name, value in values.items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")


def byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], cut: Sequence[Any], normalizer: Any = None
) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens, special ones first, trained on texts.

    The alphabet holds all 256 bytes, so that no text has unknown tokens. `cut`: pre-tokenizers that cut a text before
    merges apply.
    """
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **config: Any) -> None:
    """Write tokenizer.json, and tokenizer_config.json with these entries, for transformers' AutoTokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)


def padded_rows(
    tokenizer: Tokenizer, texts: Sequence[str], length: int
) -> tuple[Int32[np.ndarray, "N S"], Int32[np.ndarray, "N"]]:
    """Tokens of texts in rows of one length, and how many of each are not padding, which is token 0.

    Longer texts are cut.
    """
    ids = [encoding.ids[:length] for encoding in tokenizer.encode_batch_fast(list(texts))]
    rows = np.zeros((len(ids), length), np.int32)
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = own
    return rows, np.asarray([len(own) for own in ids], np.int32)
