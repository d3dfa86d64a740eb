"""UMT5's and CLIP's encoders against transformers', with random weights and of a GGUF file; images made ready for them
against Pillow's, torch's, transformers' and diffusers' own steps."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
clip_processing = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
video_processor = pytest.importorskip("diffusers.video_processor")

from tests.support import video_gguf
from tests.support.torch_weights import from_torch, spread
from verax.checkpoint.formats.gguf import GGUFFile
from verax.checkpoint.video import parts
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.quantized import umt5_tokenizer
from verax.loading import load_weights
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.images import CLIP_MEAN, CLIP_STD, crop_to_aspect, resize, to_signed
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.family import DIFFUSERS, SKYREELS, WAN

UMT5 = dict(vocab_size=100, d_model=20, d_kv=6, d_ff=36, num_layers=3, num_heads=5, feed_forward_proj="gated-gelu")
CLIP = dict(
    hidden_size=24,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=3,
    image_size=35,
    patch_size=7,
    hidden_act="gelu",
)
LENGTHS = np.array([200, 131, 1])
TOKENS = np.random.default_rng(1).integers(1, 100, (3, 200))
TOKENS = np.where(np.arange(200) < LENGTHS[:, None], TOKENS, 0).astype(np.int32)
PIXELS = np.random.default_rng(1).standard_normal((2, 35, 35, 3)).astype(np.float32)


def umt5_reference(**changes):
    model = spread(transformers.UMT5EncoderModel(transformers.UMT5Config(**{**UMT5, **changes})))
    for block in model.encoder.block:  # scores are not scaled: trained queries are small
        block.layer[0].SelfAttention.q.weight.data *= UMT5["d_kv"] ** -0.5
    return model


def umt5_theirs(model):
    mask = np.arange(TOKENS.shape[1]) < LENGTHS[:, None]
    with torch.no_grad():
        states = model(torch.from_numpy(TOKENS).long(), torch.from_numpy(mask).long()).last_hidden_state
    return states.double().numpy() * mask[..., None]


def umt5_ours(theirs, dtype=jnp.float32):
    config = UMT5Config.from_hf(theirs.config.to_dict())
    state = {key: tensor for key, tensor in theirs.state_dict().items() if key != "encoder.embed_tokens.weight"}
    model = from_torch(lambda: UMT5EncoderModel(config, dtype=dtype, rngs=nnx.Rngs(0)), parts.UMT5, state, dtype)
    return np.asarray(model(jnp.asarray(TOKENS), jnp.asarray(LENGTHS)))


def clip_reference(**changes):
    return spread(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**CLIP, **changes})))


def clip_theirs(model):
    with torch.no_grad():
        states = model(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), output_hidden_states=True).hidden_states[-2]
    return states.float().numpy()


def clip_ours(theirs, dtype=jnp.float32, prefix=""):
    config = CLIPVisionConfig.from_hf(theirs.config.to_dict())
    state = {prefix + key: tensor for key, tensor in theirs.state_dict().items()}
    model = from_torch(
        lambda: CLIPVisionModel(config, dtype=dtype, rngs=nnx.Rngs(0)), parts.CLIP, state, dtype, reshape=True
    )
    return np.asarray(model(jnp.asarray(PIXELS)))


@pytest.mark.parametrize("changes", [{}, {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 50}])
def test_float32_states_of_umt5_match_transformers(changes):
    theirs = umt5_reference(**changes)
    got, expected = umt5_ours(theirs), umt5_theirs(theirs.double())
    assert np.abs(expected).mean() > 0.3
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("prefix", ["", "vision_model."])
@pytest.mark.parametrize("changes", [{}, {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-2}])
def test_float32_states_of_clip_match_transformers(changes, prefix):
    theirs = clip_reference(**changes)
    got, expected = clip_ours(theirs, prefix=prefix), clip_theirs(theirs)
    assert got.shape == (2, 26, 24)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("reference", "run", "ours"), [(umt5_reference, umt5_theirs, umt5_ours), (clip_reference, clip_theirs, clip_ours)]
)
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(reference, run, ours):
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = reference().bfloat16()
    theirs, got = run(rounded), ours(rounded, jnp.bfloat16)
    truth = run(rounded.float())
    assert np.linalg.norm(got - truth) <= 0.8 * np.linalg.norm(theirs - truth)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("umt5") / "umt5-xxl-encoder-Q8_0.gguf"
    video_gguf.write_umt5(path)
    (path.parent / "config.json").write_text('{"_class_name": "WanModel"}')
    return path


def test_states_of_a_gguf_file_of_umt5_are_those_of_transformers(gguf_file):
    abstract = nnx.eval_shape(lambda: UMT5EncoderModel(video_gguf.UMT5, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    ours = load_weights(abstract, VideoFolder(gguf_file.parent).checkpoint("text_encoder"), dequantize=True)
    theirs = transformers.UMT5EncoderModel.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    tokens = np.random.default_rng(0).integers(0, 96, (2, 37))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).last_hidden_state.numpy()
    states = ours(jnp.asarray(tokens, jnp.int32), jnp.array([37, 37]))
    np.testing.assert_allclose(states, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("text", ["a red circle", "floating  stones", "a unknown \u00e9 letter", "</s> a", ""])
def test_ids_of_the_tokenizer_in_a_gguf_file_are_those_of_transformers(text, gguf_file):
    vocabulary = [(token, score) for token, score, _ in video_gguf.PIECES]
    theirs = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0)
    assert umt5_tokenizer(GGUFFile(gguf_file).metadata, gguf_file).encode(text).ids == theirs(text).input_ids


SHAPES = [(61, 107), (107, 61), (300, 401), (224, 224), (240, 230)]


def picture(shape):
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


ANOTHER = np.zeros((30, 40, 3), np.uint8)
"""In the place of the whole picture where the frame counts, or of the frame where the picture does."""


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_sees_what_transformers_processor_makes(shape):
    processor = clip_processing.CLIPImageProcessorPil()
    expected = processor(picture(shape), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    np.testing.assert_allclose(DIFFUSERS.clip_pixels(picture(shape), ANOTHER, 224), expected, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_sees_what_the_original_interpolates(shape):
    frame = to_signed(picture(shape))
    planes = torch.from_numpy(frame.transpose(2, 0, 1))[None].double()
    square = torch.nn.functional.interpolate(planes, size=(224, 224), mode="bicubic", align_corners=False)
    expected = (square[0].permute(1, 2, 0).numpy() * 0.5 + 0.5 - CLIP_MEAN) / CLIP_STD
    np.testing.assert_allclose(SKYREELS.clip_pixels(ANOTHER, picture(shape), 224), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "target"), [((61, 107), (48, 96)), ((90, 160), (464, 832)), ((300, 640), (432, 912))]
)
def test_wans_frames_are_what_torch_interpolates(shape, target):
    planes = torch.from_numpy(to_signed(picture(shape)).transpose(2, 0, 1))[None].double()
    expected = torch.nn.functional.interpolate(planes, size=target, mode="bicubic")[0].permute(1, 2, 0).numpy()
    got = to_signed(WAN.resize["i2v"](picture(shape), *target))
    np.testing.assert_allclose(got, expected.clip(-1, 1), atol=0.501 / 127.5)


def test_frames_are_resized_as_diffusers_does_it():
    processor = video_processor.VideoProcessor(vae_scale_factor=8)
    expected = processor.preprocess(Image.fromarray(picture((61, 107))), height=48, width=80)[0]
    got = to_signed(resize(picture((61, 107)), 48, 80))
    np.testing.assert_allclose(got, expected.permute(1, 2, 0).numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", [(544, 960), (17, 17), (96, 64)])
def test_crops_equal_pillows(shape, target):
    (h, w), (height, width) = shape, target
    # The original's arithmetic; Pillow rounds the box.
    size = (w, int(w * height / width)) if h / w > height / width else (int(h * width / height), h)
    box = ((w - size[0]) / 2, (h - size[1]) / 2, (w + size[0]) / 2, (h + size[1]) / 2)
    expected = np.asarray(Image.fromarray(picture(shape)).crop(box))
    np.testing.assert_array_equal(crop_to_aspect(picture(shape), *target), expected)


@pytest.mark.parametrize(("kind", "method"), [("i2v", Image.Resampling.LANCZOS), ("df", Image.Resampling.BICUBIC)])
def test_the_originals_frames_are_cropped_and_then_resized_by_pillow(kind, method):
    cropped = Image.fromarray(crop_to_aspect(picture((61, 107)), 48, 64))
    expected = np.asarray(cropped.resize((64, 48), method))
    np.testing.assert_allclose(SKYREELS.resize[kind](picture((61, 107)), 48, 64), expected, atol=0)
