"""A long clip as segments that fit the model, each begun by the end of the one before."""

from __future__ import annotations

from verax.errors import InvalidParameterError

__all__ = ["segment_sizes"]


def segment_sizes(latents: int, most: int, overlap: int) -> list[int]:
    """Latent frames of each segment, with those that it shares with the one before; only the last may be shorter.

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
