"""Training data of the transformer: latents, first frames and tokenised captions of drawn clips, kept on disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float16, Int32, UInt8
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from recipes import padded_rows
from recipes.video.shapes import COLOURS, DIRECTIONS, SHAPES, TEMPLATES, Scene, draw, scenes
from recipes.video.vae import FRAMES, SIZE, colours
from verax import progress
from verax.files import atomic_path
from verax.models.wan.vae import WanVae

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


TEXT_TOKENS = 24
"""Tokens of a prompt, padding included. The longest caption has 18."""

WORDS = {"shape": SHAPES, "colour": tuple(COLOURS), "direction": tuple(DIRECTIONS)} | {
    end: tuple(COLOURS) for end in ("top", "bottom")
}
"""Parts of a caption, and the words for each."""

CHUNK = 64
"""Number of clips in a file: an interruption loses at most one file. The VAE encodes AT_ONCE of them together."""
AT_ONCE = 4


class Clips(NamedTuple):
    """Batch of N clips. `condition` is the input of an image-to-video model: latents of the first frame, then grey."""

    latents: Float16[np.ndarray, "N F h w Z"]
    condition: Float16[np.ndarray, "N F h w Z"]
    first: UInt8[np.ndarray, "N H W 3"]
    tokens: Int32[np.ndarray, "N templates S"]
    lengths: Int32[np.ndarray, "N templates"]
    labels: Int32[np.ndarray, "N words"]


def clips(vae: WanVae, folder: Path, count: int, *, seed: int = 0, show_progress: bool = True) -> Clips:
    """First `count` training clips of the seed. Files that exist in `folder` are not made again.

    `count` is rounded up to whole files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encode = encoder(vae)
    starts = range(0, count, CHUNK)
    parts = []
    with progress.bar("latents", enabled=show_progress) as report:
        for done, start in enumerate(starts):
            path = folder / f"train-{start:06}.npz"
            if not path.exists():
                drawn = draw(scenes(seed, start, CHUNK), frames=FRAMES, height=SIZE, width=SIZE)
                with atomic_path(path) as partial:
                    condition = encode(condition_clips(drawn[:, 0]))
                    np.savez(partial, latents=encode(drawn), condition=condition, first=drawn[:, 0])
            with np.load(path) as saved:
                parts.append({name: saved[name] for name in ("latents", "condition", "first")})
            report(done + 1, len(starts), "")
    drawn = scenes(seed, 0, len(parts) * CHUNK)
    written = [tokens([replace(s, template=t).caption for t in range(len(TEMPLATES))]) for s in drawn]
    return Clips(
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        tokens=np.stack([rows for rows, _ in written]),
        lengths=np.stack([lengths for _, lengths in written]),
        labels=np.stack([labels(s) for s in drawn]),
    )


def encoder(vae: WanVae) -> Callable[[UInt8[np.ndarray, "N T H W 3"]], Float16[np.ndarray, "N F h w Z"]]:
    """Function from clips to their normalised latents. N must be a multiple of AT_ONCE."""
    graph, params = nnx.split(vae)

    def program(params: nnx.State, pixels: Array) -> Float[Array, "B F h w Z"]:
        return nnx.merge(graph, params).encode(colours(pixels))

    compiled = jax.jit(program)

    def encode(pixels: np.ndarray) -> np.ndarray:
        rows = [np.asarray(compiled(params, pixels[i : i + AT_ONCE])) for i in range(0, len(pixels), AT_ONCE)]
        return np.concatenate(rows).astype(np.float16)

    return encode


def condition_clips(first: UInt8[np.ndarray, "N H W 3"]) -> Float[np.ndarray, "N T H W 3"]:
    """Clips of a picture, then grey: 127.5, which is 0 on the scale from -1 to 1."""
    grey = np.full((len(first), FRAMES, *first.shape[1:]), 127.5, np.float32)
    grey[:, 0] = first
    return grey


def tokens(captions: list[str]) -> tuple[Int32[np.ndarray, "N S"], Int32[np.ndarray, "N"]]:
    """Padded rows of tokens, and the number of each row's tokens that are not padding."""
    return padded_rows(video_tokenizer(), captions, TEXT_TOKENS)


def labels(scene: Scene) -> Int32[np.ndarray, "words"]:
    """Index of each of a scene's words in `WORDS`."""
    return np.asarray([words.index(getattr(scene, name)) for name, words in WORDS.items()], np.int32)


def normalized_picture(first: Array) -> Float[Array, "B H W 3"]:
    """Picture, normalised for CLIP's image encoder (Radford et al., 2021, arXiv:2103.00020)."""
    return (jnp.asarray(first, jnp.float32) / 255 - jnp.asarray(CLIP_MEAN)) / jnp.asarray(CLIP_STD)


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
