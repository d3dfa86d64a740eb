"""Small checkpoints that this project trained itself, shipped in the package as ordinary folders of
transformers and diffusers."""

from pathlib import Path

__all__ = ["encoder", "text_model", "video_model"]


def text_model() -> Path:
    """The built-in language model: Qwen3 architecture, byte-level BPE, trained by `recipes/text`."""
    return Path(__file__).parent / "text"


def encoder() -> Path:
    """The built-in encoder of sentences, trained by `recipes/encoder`."""
    return Path(__file__).parent / "encoder"


def video_model() -> Path:
    """The built-in video model: SkyReels-V2's parts in miniature, trained by `recipes/video`."""
    return Path(__file__).parent / "video"
