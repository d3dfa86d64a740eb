"""Sections and configurations of `verax bench delta`."""

from __future__ import annotations

__all__ = ["CONFIGURATIONS", "SECTIONS"]

CONFIGURATIONS = {"Small": (1, 4, 64), "Medium": (2, 8, 128), "Large": (4, 16, 256)}
"""Those of the earlier port: batch, chunks, tokens of a chunk; 12 heads."""

SECTIONS = ("rule", "layer", "gated", "gradient", "decode", "encoder")
"""LAM's published rule by itself and the layer around it; the
exact gated rule, forward, with gradients, and its decode step; LAM's encoder."""
