"""Video: a prompt, and an image with a prompt, to clips; progress by a callback; a run that is ended early.

Run it with `python examples/video.py`, or `python examples/video.py path/to/SkyReels-V2-I2V-1.3B-540P`. The clips go to
the folder in which it runs.
"""

import sys

from verax import VideoPipeline, VideoRequest

PROMPT = "a red circle floats left over a blue to green gradient"

# The built-in model where nothing else is named: 17 frames of 64 x 64.
pipe = VideoPipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else None)

needs_most = max(pipe.plan(VideoRequest(PROMPT)), key=lambda stage: stage.peak)
print(f"memory: {needs_most.peak / 1e6:.0f} MB at most, to {needs_most.stage}")

clip = pipe(PROMPT, seed=7)
print("written:", clip.save("circle.gif"), "of", clip.frames.shape)

# An image as the first frame: here one of the clip's own; a file's name would do as well.
later = pipe("a red circle floats up over a blue to green gradient", image=clip.frames[-1])
print("written:", later.save("circle-up.gif"), "and", later.save_contact_sheet("circle-up.png"))


def enough(now):
    """Print every step; the run ends where this returns False."""
    if now.stage == "denoise":
        print(f"step {now.done} of {now.total}, latents", now.latents.shape)
    return now.stage != "denoise" or now.done < 3


print("complete:", pipe(PROMPT, callback=enough).complete)
