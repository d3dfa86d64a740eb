"""Small checkpoints that this project trained itself, shipped in the package as ordinary folders of
transformers and diffusers."""

from pathlib import Path

__all__ = ["encoder", "text_model", "video_model"]


def text_model() -> Path:
    """The built-in language model: Qwen3 architecture, byte-level BPE, trained by `verax train text-builtin`."""
    return Path(__file__).parent / "text"


def encoder() -> Path:
    """The built-in encoder of sentences, trained by `verax train encoder-builtin`."""
    return Path(__file__).parent / "encoder"


def video_model() -> Path:
    """The built-in video model: SkyReels-V2's parts in miniature, trained by `verax train video-builtin`."""
    return Path(__file__).parent / "video"
