"""Tokenizer of the built-in video model: words in lower case, then `</s>` as in UMT5."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from recipes.video.shapes import COLOURS, DIRECTIONS, SHAPES, TEMPLATES

__all__ = ["save_tokenizer", "video_tokenizer"]

PAD, END, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def video_tokenizer() -> Tokenizer:
    """Tokenizer of all words of captions; any other word is unknown."""
    texts = [re.sub(r"\{\w+\}", "", template) for template in TEMPLATES]
    words = set(re.findall(r"\w+|,", " ".join([*texts, *COLOURS, *DIRECTIONS, *SHAPES, "stands standing"])))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *sorted(words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, vocabulary[END])]
    )
    return tokenizer


def save_tokenizer(folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    video_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
