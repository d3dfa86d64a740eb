"""CLIP's image encoder by itself: sizes, names, and what is refused."""

import jax.numpy as jnp
import pytest
from flax import nnx

from verax.checkpoint.video.parts import CLIP
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel

SIZES = dict(
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=28,
    patch_size=14,
    hidden_act="gelu",
)


def parameters(config):
    abstract = nnx.eval_shape(lambda: CLIPVisionModel(config, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract))}


def test_vit_h_14_has_its_published_size():
    shapes = parameters(CLIPVisionConfig())
    head = 1280 * 1024  # the projection to CLIP's common space, which is left in the file
    assert sum(leaf.size for leaf in shapes.values()) + head == 632_076_800
    assert shapes["visual.pos_embedding"].shape == (1, 257, 1280)
    assert shapes["visual.patch_embedding.weight"].shape == (1280, 3, 14, 14)
    assert shapes["visual.transformer.31.attn.to_qkv.bias"].shape == (3840,)


def test_every_parameter_has_its_names_in_the_other_layout():
    for name in parameters(CLIPVisionConfig(**SIZES)):
        others = CLIP.forward(name)
        assert len(others) == (3 if "to_qkv" in name else 1)
        for part, other in enumerate(others):
            assert other.startswith("vision_model.")
            assert CLIP.backward(other) == (name, part)
            assert CLIP.backward(other.removeprefix("vision_model.")) == (name, part)


def test_an_image_of_another_size_is_refused():
    model = CLIPVisionModel(CLIPVisionConfig(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(InvalidParameterError, match=r"expected images of 28 x 28, got \(42, 28\)"):
        model(jnp.zeros((1, 42, 28, 3)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "siglip_vision_model"}, "model_type 'siglip_vision_model'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_channels": 4}, "num_channels 4"),
        ({"num_attention_heads": 5}, "hidden_size 12 is not a multiple of num_attention_heads 5"),
        ({"image_size": 30}, "image_size 30 is not a multiple of patch_size 14"),
        ({"image_size": [28, 28]}, "image_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        CLIPVisionConfig.from_hf({**SIZES, **changes})


def test_the_image_encoder_of_a_whole_clip_is_read():
    nested = {"model_type": "clip", "text_config": {"hidden_size": 8}, "vision_config": SIZES}
    assert CLIPVisionConfig.from_hf(nested) == CLIPVisionConfig.from_hf(SIZES)
    with pytest.raises(UnsupportedModelError, match="model_type 'clip'"):
        CLIPVisionConfig.from_hf({"model_type": "clip"})


def test_a_missing_size_is_named():
    with pytest.raises(UnsupportedModelError, match="lacks patch_size, hidden_act"):
        CLIPVisionConfig.from_hf({key: SIZES[key] for key in SIZES if key not in ("patch_size", "hidden_act")})
