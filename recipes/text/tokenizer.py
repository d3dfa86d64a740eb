"""Tokenizer of the built-in model: byte-level BPE as in GPT-2 and Qwen, with every digit as a separate token.

Nothing is normalised, and the alphabet holds all 256 bytes, so that decoding restores every text exactly. The saved
folder loads with `tokenizers` and with transformers' AutoTokenizer.
"""

import json
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.text.data import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START, documents

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
VOCAB_SIZE = 1536
TRAINING_DOCUMENTS = 60_000

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Qwen2: words with the space before them, single digits, runs of punctuation, line ends."""


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Tokenizer of `VOCAB_SIZE` tokens, special tokens first, from the first training documents of the seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
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
    texts = (document.text for document in islice(documents(seed), TRAINING_DOCUMENTS))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context: int = 1024) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    ends = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
