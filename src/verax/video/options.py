"""`VideoRequest`: the options of a clip, each declared once, for Python, HTTP and the command line.

The module imports the standard library and the recipes only, so that `verax video --help` is quick;
`verax.video.request` resolves and checks a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verax.options import documented, option
from verax.video.recipes import RECIPES

if TYPE_CHECKING:
    from verax.video.outputs import Callback

_FORCING = "Diffusion forcing"
_VACE = "VACE"
_SPEED = "Speed and memory"
_CHECKPOINT = "checkpoint's"

_MOST_PIXELS, _MOST_FRAMES, _MOST_STEPS = 1 << 15, 100_000, 10_000
"""Limits far beyond what any model makes. Without them, a slip of the keyboard fills the memory with lists of segments
and tables of steps before anything can say that it does not fit."""


@documented
@dataclass(frozen=True, eq=False)
class VideoRequest:
    """A clip to be made by `VideoPipeline.generate`. An option that is None has the checkpoint's value.

    A request is checked when a pipeline takes it: what fits depends on the checkpoint.
    """

    prompt: str | Sequence[str] | None = option(
        None,
        "Description of the clip; again for each segment. A list has one description for each segment of a long clip, "
        "and the last is for all that follow.",
        shown="",
    )
    _: KW_ONLY
    image: Any = option(
        None, "An image: the first frame. A path, a PIL.Image, or an array `[H, W, 3]` (uint8, or floats from 0 to 1)."
    )
    last_image: Any = option(
        None,
        "An image: the last frame, for Wan2.1-FLF2V, Wan2.2-I2V-A14B and diffusion forcing. Of the types of `image`, "
        "which the first two need too.",
        flags=("--last-image", "--end-image"),
    )
    video: Any = option(
        None,
        "A clip to continue (diffusion forcing), or a control clip (VACE). A path, a list of images, or an array "
        "`[T, H, W, 3]`. The continuation begins with it, and `num_frames` counts from the first of its last "
        "`overlap_history` frames. A control clip has at least `num_frames` frames, and the first of them are used.",
        flags=("--video", "--video-path"),
    )
    mask: Any = option(
        None,
        "Masks of the control clip: white is made new, black is kept. Of the types of `video`, with as many frames, or "
        "one frame for all; without masks, all is made new.",
        panel=_VACE,
    )
    reference_images: Sequence[str] | Any = option(
        None,
        "A picture of a thing or person that the clip shows; can be repeated. A list of images of the types of "
        "`image`, or one image; at most as many as the clip has latent frames.",
        flags=("--reference-image", "--reference-images"),
        panel=_VACE,
        shown="",
    )
    conditioning_scale: str | Sequence[float] | None = option(
        None,
        "Scale of the control clip and references: a number, or one for each control layer, as `1,0.5`.",
        panel=_VACE,
        shown="1",
    )
    negative_prompt: str | None = option(
        None,
        "Description of what the clip should not show. Unused where `guidance_scale` is 1 or less.",
        shown=_CHECKPOINT,
    )
    height: int | None = option(
        None,
        "Height of a frame in pixels, a multiple of 16. Of 32 for Wan2.2's 5B. If height and width are both None, and "
        "the image is upright, so is the clip; a model of Wan makes frames of the image's shape.",
        high=_MOST_PIXELS,
        shown=_CHECKPOINT,
    )
    width: int | None = option(
        None,
        "Width of a frame in pixels, a multiple of 16. Of 32 for Wan2.2's 5B.",
        high=_MOST_PIXELS,
        shown=_CHECKPOINT,
    )
    resolution: str | None = option(
        None, "540P (544 x 960) or 720P (720 x 1280), in place of height and width.", shown=_CHECKPOINT
    )
    num_frames: int | None = option(
        None,
        "Number of frames, 4n + 1. More than `base_num_frames` are made in segments.",
        high=_MOST_FRAMES,
        shown=_CHECKPOINT,
    )
    num_inference_steps: int | None = option(
        None,
        "Steps of the solver.",
        low=1,
        high=_MOST_STEPS,
        flags=("--inference-steps", "--num-inference-steps", "--steps"),
        shown=_CHECKPOINT,
    )
    guidance_scale: float | None = option(
        None, "Scale of classifier-free guidance; 1 or less for none.", low=0, shown=_CHECKPOINT
    )
    guidance_scale_2: float | None = option(
        None,
        "Scale with the second of two transformers, where noise is low. `guidance_scale` if only that is given.",
        low=0,
        shown=_CHECKPOINT,
    )
    shift: float | None = option(
        None,
        "Shift of the noise levels: more gives more steps at high noise. See `video_model.flow_sigmas`.",
        low=0,
        above=True,
        shown=_CHECKPOINT,
    )
    recipe: str | None = option(
        None,
        "lightx2v, self-forcing, causvid or fastwan: few steps of a distilled checkpoint or LoRA, without guidance. It "
        "sets `num_inference_steps`, `guidance_scale`, `shift`, `solver` and `sigmas`, see `verax.video.recipes`.",
        choices=tuple(RECIPES),
        shown="",
    )
    solver: str | None = option(
        None,
        "unipc, dpm++, euler or lcm. `dpm++` is DPM-Solver++ of order 2; `lcm` predicts the clean clip in each step, "
        "and adds fresh noise to it.",
        choices=("unipc", "dpm++", "euler", "lcm"),
        shown=_CHECKPOINT,
    )
    sigmas: str | Sequence[float] | None = option(
        None,
        "Noise level of each step before the shift, falling, as `1,0.75,0.5,0.25`. In place of the reference's "
        "spacing; numbers of more than 0 and at most 1.",
        shown="",
    )
    fps: int | None = option(
        None,
        "Frames per second. Of the file, and as an input of models that have one. None: those of `video`.",
        low=1,
        high=1000,
        shown=_CHECKPOINT,
    )
    seed: int = option(42, "The same seed gives the same clip. It seeds the noise.", low=0, high=2**64 - 1)
    latents: Any = option(
        None,
        "Initial noise of the first segment, `[1, channels, F, h, w]`: `[1, 16, F, height / 8, width / 8]`, and "
        "`[1, 48, F, height / 16, width / 16]` for Wan2.2's 5B.",
    )
    prompt_embeds: Any = option(None, "States `[1, tokens, width]` of the text encoder in place of the prompt.")
    negative_prompt_embeds: Any = option(
        None, "States `[1, tokens, width]` of the text encoder in place of the negative prompt."
    )
    output_type: str = option(
        "video", '`"video"` (uint8), `"np"` (float32 from 0 to 1), or `"latent"`.', choices=("video", "np", "latent")
    )
    callback: Callback | None = option(
        None, "Function that is called after every step, see `VideoProgress`; the run ends if it returns False."
    )
    cache: str | None = option(
        None,
        "teacache or magcache: skip the transformer's blocks in steps that change little. See `verax.video.caches`.",
        choices=("teacache", "magcache"),
        panel=_SPEED,
    )
    cache_threshold: float | None = option(
        None,
        "A higher threshold skips more; 0.1 to 0.3 is usual with teacache, 0.04 to 0.24 with magcache. The sum of "
        "estimated changes up to which steps are skipped.",
        low=0,
        above=True,
        flags=("--cache-threshold", "--teacache-thresh"),
        panel=_SPEED,
        shown="0.2 for teacache, 0.12 for magcache",
    )
    cache_max_skip_steps: int | None = option(
        None, "MagCache's most skipped steps in a row.", low=0, panel=_SPEED, shown="3"
    )
    cache_retention_ratio: float | None = option(
        None, "Share of the steps, the first ones, that MagCache never skips.", low=0, high=1, panel=_SPEED, shown="0.2"
    )
    cache_curve: str | Path | None = option(
        None,
        "File with MagCache's curve of this checkpoint and number of steps, as `--calibrate` writes it. In place of "
        "the published curve.",
        panel=_SPEED,
        shown="",
    )
    half_size_steps: int = option(
        0,
        "First steps at half the height and width, a quarter of the tokens or less. The clean clip that the last of "
        "them predicts is enlarged and gets noise again. See `denoise.enlarged`.",
        low=0,
        panel=_SPEED,
    )
    guidance: str = option(
        "auto",
        "batch; sequential for less memory; auto: the first that fits. `batch` computes prompt and negative prompt "
        "together, `sequential` one after the other.",
        choices=("auto", "batch", "sequential"),
        panel=_SPEED,
    )
    ar_step: int = option(
        0,
        "Steps by which a block follows the block before it; 0 for all together. Diffusion forcing only.",
        low=0,
        high=_MOST_STEPS,
        panel=_FORCING,
    )
    causal_block_size: int | None = option(
        None, "Latent frames in a block. Every segment must be whole blocks.", low=1, panel=_FORCING
    )
    causal_attention: bool | None = option(
        None,
        "True if a block sees earlier blocks only. No released model was trained for it; diffusers does it whenever "
        'there are blocks, and so does `reference="diffusers"`.',
    )
    overlap_history: int | None = option(None, "Frames that segments share, 4n + 1.", high=_MOST_FRAMES, panel=_FORCING)
    addnoise_condition: int = option(
        0,
        "Noise on prefix frames; 20 hides seams. Timesteps, of 1000, that are added where the model sees the frames.",
        low=0,
        high=1000,
        panel=_FORCING,
    )
    base_num_frames: int | None = option(None, "Frames of a segment, 4n + 1.", high=_MOST_FRAMES, panel=_FORCING)
    attention: str = option(
        "auto",
        "auto, standard, chunked or flash. They are described at `verax.models.video_model.ATTENTION`.",
        choices=("auto", "standard", "chunked", "flash"),
        panel=_SPEED,
    )
    resume: str | Path | None = option(
        None,
        "A folder that keeps finished segments, to continue from. If it exists, segments are taken from it: the same "
        "request then continues where it ended, also with other prompts for later segments, or more frames.",
    )

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompt of each segment; the last is also for the segments that follow."""
        return () if self.prompt is None else (self.prompt,) if isinstance(self.prompt, str) else tuple(self.prompt)
