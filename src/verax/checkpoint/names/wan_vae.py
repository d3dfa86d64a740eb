"""Parameter names of the video VAEs: those of `Wan2.1_VAE.pth`, `Wan2.2_VAE.pth` and diffusers' `AutoencoderKLWan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.checkpoint.names.table import Renaming

__all__ = ["TABLE", "name_table", "table_for"]

_BLOCK = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_MIDDLE = {"middle.0": "mid_block.resnets.0", "middle.2": "mid_block.resnets.1"}
_SINGLE = {
    "conv1": "conv_in",
    "middle.1": "mid_block.attentions.0",
    "head.0": "norm_out",
    "head.2": "conv_out",
}


def name_table(num_res_blocks: int = 2, levels: int = 4, *, residual: bool = False) -> Renaming:
    """The table of a model with so many residual blocks at each of so many resolutions of its encoder.

    The original of Wan 2.1 counts the decoder's layers through, diffusers within each resolution. Where the levels are
    `residual`, as in Wan 2.2, both count within each, and the original goes on to the resampling layer.
    """
    blocks = _residual(num_res_blocks, levels) if residual else _plain(num_res_blocks, levels)
    rules = [("conv1", "quant_conv"), ("conv2", "post_quant_conv")]
    for part in ("encoder", "decoder"):
        rules += [(f"{part}.{ours}", f"{part}.{theirs}") for ours, theirs in _SINGLE.items()]
        blocks |= {f"{part}.{ours}": f"{part}.{theirs}" for ours, theirs in _MIDDLE.items()}
    for ours, theirs in blocks.items():
        rules += [(f"{ours}.{layer}", f"{theirs}.{name}") for layer, name in _BLOCK.items()]
        rules += [(f"{ours}.{layer}", f"{theirs}.{layer}") for layer in ("resample", "time_conv")]
    return Renaming(rules)


def table_for(settings: Mapping[str, Any]) -> Renaming:
    """The table of a model with these settings of diffusers' config.json; the published ones where they say nothing."""
    levels = len(settings.get("dim_mult") or (1, 2, 4, 4))
    return name_table(settings.get("num_res_blocks", 2), levels, residual=bool(settings.get("is_residual")))


def _plain(num_res_blocks: int, levels: int) -> dict[str, str]:
    blocks = {"encoder.downsamples.{i}": "encoder.down_blocks.{i}"}
    layer = 0
    for level in range(levels):
        for block in range(num_res_blocks + 1):
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.resnets.{block}"
            layer += 1
        if level < levels - 1:
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.upsamplers.0"
            layer += 1
    return blocks


def _residual(num_res_blocks: int, levels: int) -> dict[str, str]:
    blocks = {}
    for level in range(levels):
        down, up = f"encoder.downsamples.{level}.downsamples", f"decoder.upsamples.{level}.upsamples"
        for ours, theirs, count, last in (
            (down, f"encoder.down_blocks.{level}", num_res_blocks, "downsampler"),
            (up, f"decoder.up_blocks.{level}", num_res_blocks + 1, "upsampler"),
        ):
            blocks |= {f"{ours}.{block}": f"{theirs}.resnets.{block}" for block in range(count)}
            blocks[f"{ours}.{count}"] = f"{theirs}.{last}"
    return blocks


TABLE = name_table()
"""The table of the published model."""
