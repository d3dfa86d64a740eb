"""Small checkpoints that this project trained itself, shipped in the package as ordinary Hugging Face folders."""

from pathlib import Path

__all__ = ["encoder", "text_model"]


def text_model() -> Path:
    """The built-in language model: Qwen3 architecture, byte-level BPE, trained by `verax train text-builtin`."""
    return Path(__file__).parent / "text"


def encoder() -> Path:
    """The built-in encoder of sentences, trained by `verax train encoder-builtin`."""
    return Path(__file__).parent / "encoder"
