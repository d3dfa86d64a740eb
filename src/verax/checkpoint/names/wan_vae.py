"""Parameter names of the video VAE: those of `Wan2.1_VAE.pth`, and those of diffusers' `AutoencoderKLWan`."""

from __future__ import annotations

from verax.checkpoint.names.table import Renaming

__all__ = ["TABLE", "name_table"]

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


def name_table(num_res_blocks: int = 2, levels: int = 4) -> Renaming:
    """The table of a model with so many residual blocks at each of so many resolutions of its encoder.

    The original counts the decoder's layers through, diffusers within each resolution.
    """
    blocks = {"encoder.downsamples.{i}": "encoder.down_blocks.{i}"}
    layer = 0
    for level in range(levels):
        for block in range(num_res_blocks + 1):
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.resnets.{block}"
            layer += 1
        if level < levels - 1:
            blocks[f"decoder.upsamples.{layer}"] = f"decoder.up_blocks.{level}.upsamplers.0"
            layer += 1
    rules = [("conv1", "quant_conv"), ("conv2", "post_quant_conv")]
    for part in ("encoder", "decoder"):
        rules += [(f"{part}.{ours}", f"{part}.{theirs}") for ours, theirs in _SINGLE.items()]
        blocks |= {f"{part}.{ours}": f"{part}.{theirs}" for ours, theirs in _MIDDLE.items()}
    for ours, theirs in blocks.items():
        rules += [(f"{ours}.{layer}", f"{theirs}.{name}") for layer, name in _BLOCK.items()]
        rules += [(f"{ours}.{layer}", f"{theirs}.{layer}") for layer in ("resample", "time_conv")]
    return Renaming(rules)


TABLE = name_table()
"""The table of the published model."""
