"""Adapters: slots, layers, loading, and what a follower of several hosts writes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.adapters import adapter_weights, save_adapter
from tests.support.tiny import tiny_config
from verax.errors import CheckpointError, InvalidParameterError
from verax.models import causal_lm
from verax.text.features.lora import AdaptedLayers, AdapterLoader, LoadedAdapter, LoRARequest
from verax.text.hosts import Dispatch, Group
from verax.text.step.program import AbstractModel
from verax.text.step.runner import DeviceAdapters

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
DENSE = ATTENTION | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


def layers_of(family, **changes):
    architecture, config = causal_lm(tiny_config(family, **changes))
    model = AbstractModel.from_module(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0))))
    return AdaptedLayers.of(model.build, model.weights, max_loras=2, max_rank=3)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"tie_word_embeddings": False}, DENSE),
        ("llama", {}, DENSE),
        ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}, DENSE),
        ("phi3", {}, {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
        ("qwen3_moe", EXPERTS, ATTENTION),
        ("gpt_oss", EXPERTS, ATTENTION),
        ("gemma4_text", {}, DENSE | {"per_layer_input_gate", "per_layer_projection"}),
    ],
)
def test_layers_are_what_every_token_passes_without_the_head(family, changes, expected):
    layers = layers_of(family, **changes)
    by_layer = {name for name in layers.shapes if name != "model.per_layer_model_projection"}  # of all layers at once
    assert by_layer == {f"model.layers.{i}.{name}" for i in range(2) for name in expected}
    size = {"k_proj": (32, 64)} if family != "phi3" else {"qkv_proj": (128, 64)}
    assert all(layers.shapes[f"model.layers.0.self_attn.{name}"] == shape for name, shape in size.items())


def test_layers_go_by_their_names_in_every_published_layout():
    layers = layers_of("gemma3_text", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16)
    path = "model.layers.1.mlp.up_proj"
    for name in (path, "model.language_model.layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"):
        assert layers.names[name] == path


PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def loader():
    layers = AdaptedLayers({PATH: (6, 8)}, {PATH: PATH, "layers.0.self_attn.q_proj": PATH}, 1, 4, "float32")
    return AdapterLoader(layers, 2)


@pytest.fixture
def make(tmp_path):
    def save(number=1, sizes=None, **settings):
        weights = adapter_weights(sizes or {PATH: (6, 8)}, rank=settings.get("rank", 4))
        return LoRARequest(f"a{number}", number, save_adapter(tmp_path / f"a{number}", weights, **settings))

    return save


def test_a_slow_disk_holds_up_no_other_adapter_and_each_is_read_once(loader, make, monkeypatch):
    slow, quick, begun, goes = make(1), make(2), threading.Event(), threading.Event()
    loaded, read, reads = loader.load(quick), loader._read, []

    def read_slowly(request):
        reads.append(request)
        begun.set()
        assert goes.wait(20)
        return read(request)

    monkeypatch.setattr(loader, "_read", read_slowly)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(loader.load, slow) for _ in range(2)]
        assert begun.wait(20)
        assert loader.load(quick) is loaded
        goes.set()
        assert both[0].result() is both[1].result()
    assert reads == [slow]


def test_an_adapter_that_cannot_be_read_can_be_tried_again(loader, make, tmp_path):
    with pytest.raises(CheckpointError):
        loader.load(LoRARequest("a", 1, tmp_path / "missing"))
    assert loader.load(make(1)).id == 1


def test_a_number_stands_for_one_folder(loader, make):
    loader.load(make())
    with pytest.raises(InvalidParameterError, match="lora_int_id: 1 stands for the adapter in"):
        loader.load(LoRARequest("b", 1, make(2).lora_path))


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        ({"rank": 5}, InvalidParameterError, r"max_lora_rank: .* has rank 5, .* pass LLM\(..., max_lora_rank=5\)"),
        ({"sizes": {PATH: (6, 9)}}, CheckpointError, r"another base.*q_proj \(adapter \[6, 9\], model \[6, 8\]\)"),
        ({"sizes": {"lm_head": (6, 8)}}, CheckpointError, "no layers .* lm_head; it was trained for somebody/tiny"),
        ({"sizes": {f"model.h.{i}.c": (6, 8) for i in range(9)}}, CheckpointError, r"model\.h\.4\.c and 4 more"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(loader, make, made, error, says):
    with pytest.raises(error, match=says):
        loader.load(make(**made))


def test_matrices_of_a_vision_tower_are_left_out_of_an_adapter_that_changes_the_text_too(make):
    layers = layers_of("qwen3")
    path, tower = "model.layers.1.self_attn.q_proj", "model.visual.blocks.0.attn.qkv"
    loader = AdapterLoader(layers, 2)
    both = make(1, {path.replace("model.", "model.language_model."): layers.shapes[path], tower: (9, 5)}, rank=3)
    assert set(loader.load(both).matrices) == {path}
    with pytest.raises(CheckpointError, match=tower):
        loader.load(make(2, {tower: (9, 5)}, rank=3))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *((values, "lora_name: expected a name") for values in (("", 1, "path"), (3, 1, "path"))),
        *((("a", number, "path"), "lora_int_id: expected a whole number of at least 1") for number in (0, True, "1")),
        *((("a", 1, path), "lora_path: expected an adapter's folder") for path in ("", None)),
    ],
)
def test_a_request_with_wrong_values_is_refused(values, says):
    with pytest.raises(InvalidParameterError, match=says):
        LoRARequest(*values)


class Leader(Group):
    """The group of rank 0, which keeps what is sent."""

    def __init__(self):
        super().__init__(0, 2)
        self.sent = []

    def send(self, dispatch):
        self.sent.append(dispatch.encode())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_follower_writes_the_adapters_that_rank_0_sends(dtype):
    sizes = {"up": (7, 5), "down": (5, 7)}  # odd: in bfloat16 they are no whole number of int32
    layers = AdaptedLayers(sizes, {}, max_loras=2, max_rank=3, dtype=dtype)
    leader, follower = DeviceAdapters(layers, group=Leader()), DeviceAdapters(layers)
    rng = np.random.default_rng(0)
    matrices = {"down": (rng.standard_normal((2, 7)).astype(dtype), rng.standard_normal((5, 2)).astype(dtype))}
    leader.warm_up()
    adapter = LoadedAdapter(LoRARequest("fox", 1, "adapters/fox"), matrices)
    leader.place(adapter, 1)
    leader.place(adapter, 1)  # it is there already
    dispatches = [Dispatch.decode(message) for message in leader._group.sent]
    assert [dispatch.program for dispatch in dispatches] == ["adapt", "adapt"]
    for dispatch in dispatches:
        follower.repeat(*dispatch.unpack())
    for ours, theirs in zip(leader.arrays, follower.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.any(np.asarray(follower.arrays[2], np.float32))
