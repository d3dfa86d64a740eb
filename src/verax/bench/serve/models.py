"""Checkpoints that load tests serve: one at hand, the built-in one, or random weights with a made-up tokenizer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from verax import builtin, checkpoint
from verax.bench.text.run import checkpoint_folder
from verax.errors import InvalidParameterError
from verax.models import causal_lm
from verax.shapes import SHAPES

__all__ = ["ServedModel", "served_model", "write_tokenizer"]


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint, and a folder for files that are made of it."""

    name: str
    """The model in words, for reports."""
    argument: str | None
    """Model as `verax serve` takes it; None for the built-in one."""
    path: Path
    scratch: Path

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return causal_lm(checkpoint.Checkpoint.open(self.path).config)[1].vocab_size

    def gguf(self, kind: str) -> Path:
        """GGUF file for llama.cpp: the checkpoint itself if it is one, or else its weights and its vocabulary.

        Args:
            kind: type of the matrices, one of `GGUF_TYPES`.
        """
        from verax.bench.text.gguf_writer import write_gguf

        opened = checkpoint.Checkpoint.open(self.path)
        if opened.metadata:
            return self.path
        return write_gguf(opened, self.scratch / f"{kind}.gguf", kind, vocabulary=self.path / "tokenizer.json")


@contextlib.contextmanager
def served_model(model: str | None, shapes: str | None, dtype: str) -> Iterator[ServedModel]:
    """The checkpoint of a load test; what is made for it is gone afterwards.

    Args:
        model: a checkpoint; the built-in one if None.
        shapes: of random weights in its place, a name out of `SHAPES`.
        dtype: of the weights in the engine.

    Raises:
        InvalidParameterError: for unknown shapes, or shapes beside a model.
    """
    if shapes is not None and (model is not None or shapes not in SHAPES):
        raise InvalidParameterError(f"shapes: expected one of {', '.join(SHAPES)} and no model, got {shapes!r}")
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name, contextlib.ExitStack() as stack:
        scratch = Path(name)
        if shapes is not None:
            words, config = SHAPES[shapes]
            path = stack.enter_context(checkpoint_folder(None, dtype, config))
            write_tokenizer(path, config["vocab_size"])
            yield ServedModel(f"random weights, {words}", str(path), path, scratch)
        elif model is not None:
            yield ServedModel(model, model, Path(checkpoint.resolve(model)), scratch)
        else:
            yield ServedModel("the built-in model", None, builtin.text_model(), scratch)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a `tokenizer.json` of so many tokens: all bytes, then words, so that any id has a text."""
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = [("Ġ", "w")]
    for number in range(len(vocabulary), vocab_size):
        vocabulary["Ġw" if len(vocabulary) == 256 else f"Ġw{number}"] = number
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
