"""Tokenizer of the built-in encoder: byte-level BPE in lower case, between [CLS] and [SEP] as in BERT.

Every digit is a separate token. The alphabet holds all bytes, so no text has unknown tokens.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from recipes.encoder.paraphrases import pairs

PAD, BEGIN, END = SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]")
VOCAB_SIZE = 3072
TRAINING_PAIRS = 20_000


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Tokenizer of at most `VOCAB_SIZE` tokens, special ones first, from the first training sentences of the seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sentences = (sentence for _, pair in islice(pairs(seed), TRAINING_PAIRS) for sentence in pair)
    tokenizer.train_from_iterator(sentences, trainer)
    numbered = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=numbered)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": BEGIN,
        "sep_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
