"""Images made ready for models against Pillow's, torch's, transformers' and diffusers' own steps."""

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
clip_processing = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
video_processor = pytest.importorskip("diffusers.video_processor")

from verax.models.images import (
    CLIP_MEAN,
    CLIP_STD,
    clip_pixels_diffusers,
    clip_pixels_skyreels,
    crop_to_aspect,
    resize,
    to_signed,
)

SHAPES = [(61, 107), (107, 61), (300, 401), (224, 224), (240, 230)]


def picture(shape):
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_sees_what_transformers_processor_makes(shape):
    processor = clip_processing.CLIPImageProcessorPil()
    expected = processor(picture(shape), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    np.testing.assert_allclose(clip_pixels_diffusers(picture(shape)), expected, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_sees_what_the_original_interpolates(shape):
    frame = to_signed(picture(shape))
    planes = torch.from_numpy(frame.transpose(2, 0, 1))[None].double()
    square = torch.nn.functional.interpolate(planes, size=(224, 224), mode="bicubic", align_corners=False)
    expected = (square[0].permute(1, 2, 0).numpy() * 0.5 + 0.5 - CLIP_MEAN) / CLIP_STD
    np.testing.assert_allclose(clip_pixels_skyreels(frame), expected, atol=2e-6)


def test_frames_are_resized_as_diffusers_does_it():
    processor = video_processor.VideoProcessor(vae_scale_factor=8)
    expected = processor.preprocess(Image.fromarray(picture((61, 107))), height=48, width=80)[0]
    got = to_signed(resize(picture((61, 107)), 48, 80))
    np.testing.assert_allclose(got, expected.permute(1, 2, 0).numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", [(544, 960), (17, 17), (96, 64)])
def test_crops_are_those_that_pillow_rounds(shape, target):
    (h, w), (height, width) = shape, target
    # The original's arithmetic; Pillow rounds the box.
    size = (w, int(w * height / width)) if h / w > height / width else (int(h * width / height), h)
    box = ((w - size[0]) / 2, (h - size[1]) / 2, (w + size[0]) / 2, (h + size[1]) / 2)
    expected = np.asarray(Image.fromarray(picture(shape)).crop(box))
    np.testing.assert_array_equal(crop_to_aspect(picture(shape), *target), expected)
