"""Sizes of a clip in latents: the geometry of a checkpoint, and the segments of a long clip."""

from __future__ import annotations

from dataclasses import dataclass

from verax.errors import InvalidParameterError

__all__ = ["LatentGeometry", "segment_sizes"]


@dataclass(frozen=True)
class LatentGeometry:
    """Sizes that turn frames and pixels into latents and tokens, for one checkpoint.

    Attributes:
        frames_per_latent: frames of a latent frame; the first latent frame is one frame.
        pixels_per_latent: height and width of a latent in pixels.
        pixels_per_token: height and width of a transformer's token in pixels.
        channels: channels of a latent.
        text_width: width of the text encoder's states.
    """

    frames_per_latent: int
    pixels_per_latent: int
    pixels_per_token: int
    channels: int
    text_width: int

    def latents(self, frames: int) -> int:
        """Number of latent frames of a number of frames."""
        return (frames - 1) // self.frames_per_latent + 1

    def shape(self, latents: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Shape `[1, F, h, w, C]` of the latents of a clip, whose height and width are in pixels."""
        pixels = self.pixels_per_latent
        return 1, latents, height // pixels, width // pixels, self.channels


def segment_sizes(latents: int, most: int, overlap: int) -> list[int]:
    """Latent frames of each segment, including those that it shares with the segment before. The last may be shorter.

    Args:
        latents: of the whole clip.
        most: of a segment.
        overlap: shared by two segments.

    Raises:
        InvalidParameterError: if segments overlap wholly.
    """
    if latents <= most:
        return [latents]
    if overlap >= most:
        raise InvalidParameterError(
            f"overlap_history: {overlap} latent frames, which is all of a segment's {most} (base_num_frames)"
        )
    sizes = [most]
    while (left := latents - len(sizes) * (most - overlap) - overlap) > 0:
        sizes.append(min(left + overlap, most))
    return sizes
