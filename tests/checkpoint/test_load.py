"""Weights into modules: misfits are named, dtypes convert, meshes get slices, stacks of experts are put together."""

import json
import os
import re
import subprocess
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.checkpoint.small import raw_file
from tests.support.packing import awq, float8, gptq
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config, tiny_tokenizer
from verax import checkpoint
from verax.checkpoint import Checkpoint, load, load_module
from verax.checkpoint.formats import compressed_tensors
from verax.checkpoint.load import DRAWN, random_weight
from verax.errors import CheckpointError
from verax.loading import load_causal_lm
from verax.nn import Linear, RMSNorm
from verax.ops import QuantizedWeight, quantize
from verax.ops.memory import HostMemory
from verax.text.tokens.tokenizer import Tokenizer


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Linear(5, 3, bias=True, dtype=jnp.float32, rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(5, eps=1e-6, dtype=jnp.float32)
        self.gain = nnx.Param(jnp.ones(()))


ABSTRACT = nnx.eval_shape(lambda: Pair(nnx.Rngs(0)))


def weights(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"norm.weight": (5,), "gain": ()}
    for i in range(2):
        shapes |= {f"layers.{i}.weight": (3, 5), f"layers.{i}.bias": (3,)}
    return {key: np.asarray(rng.standard_normal(shape), dtype) for key, shape in shapes.items()}


def saved(folder, arrays, **options):
    return Checkpoint.open(checkpoint.save(arrays, folder, config={}, **options))


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.bfloat16, jnp.float32])
def test_every_float_type_loads_into_every_other(tmp_path, stored, wanted):
    arrays = weights(stored)
    model = load_module(ABSTRACT, saved(tmp_path, arrays), dtype=wanted)
    assert model.layers[1].weight[...].dtype == wanted
    np.testing.assert_array_equal(model.layers[1].weight[...], arrays["layers.1.weight"].astype(wanted))
    assert model.gain[...] == arrays["gain"].astype(wanted)


def test_the_loaded_model_does_not_depend_on_the_file_any_more(tmp_path):
    # Data at a multiple of 64 bytes is what a CPU device would use as its own memory.
    kernel = np.arange(4096, dtype=np.float32).reshape(64, 64)
    header = {"weight": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, kernel.nbytes]}}
    text = json.dumps(header).encode().ljust(120)
    (tmp_path / "config.json").write_text("{}")
    path = raw_file(tmp_path / "model.safetensors", text, kernel.tobytes())
    abstract = nnx.eval_shape(lambda: Linear(64, 64, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    model = load_module(abstract, Checkpoint.open(tmp_path), dtype=jnp.float32)
    with path.open("r+b") as file:  # in place: the mapping sees it
        file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(model.weight[...], kernel)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"layers.0.bias": None, "norm.weight": None},
            r"2 weights \(.*layers\.0\.bias.*norm\.weight.*\) missing",
        ),
        ({"inv_freq": np.ones(2, np.float32)}, r"inv_freq unexpected \(in model\.safetensors\)"),
        ({"norm.weight": np.ones(6, np.float32)}, r"model\.safetensors: norm\.weight has shape \[6\], .* needs \[5\]"),
        ({"norm.weight": np.ones(5, np.int32)}, r"norm\.weight has dtype int32"),
    ],
)
def test_weights_that_do_not_fit_are_named_with_their_file(changes, says, tmp_path):
    arrays = {name: array for name, array in {**weights(), **changes}.items() if array is not None}
    with pytest.raises(CheckpointError, match=says):
        load_module(ABSTRACT, saved(tmp_path, arrays), dtype=jnp.float32)


def test_unexpected_weights_can_be_ignored(tmp_path):
    opened = saved(tmp_path, {**weights(), "rotary_emb.inv_freq": np.ones(2, np.float32)})
    load_module(ABSTRACT, opened, dtype=jnp.float32, ignore=[r"inv_freq$"])


def test_progress_counts_bytes_up_to_all(tmp_path):
    seen = []
    load_module(ABSTRACT, saved(tmp_path, weights()), dtype=jnp.float32, progress=lambda d, t: seen.append((d, t)))
    assert seen[-1] == (4 * 42, 4 * 42)
    assert seen == sorted(seen)


@pytest.mark.parametrize("shard", [10**9, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_saving_and_loading_gives_the_same_bits(tmp_path, shard, dtype):
    model = load_module(ABSTRACT, saved(tmp_path / "a", weights()), dtype=dtype)
    checkpoint.save(model, tmp_path / "b", config={"x": 1}, max_shard_bytes=shard)
    opened = Checkpoint.open(tmp_path / "b")
    assert (len(list((tmp_path / "b").glob("*.safetensors"))) > 1) == (shard == 64)
    assert opened.config == {"x": 1}
    again = load_module(ABSTRACT, opened, dtype=dtype)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tokenizer_is_saved_with_its_named_chat_templates_again_and_again(tmp_path):
    source = tiny_tokenizer(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "chat_template.jinja").write_text("default")
    for _ in range(2):
        folder = checkpoint.save(weights(), tmp_path / "out", config={}, tokenizer_from=source)
        assert Tokenizer.from_folder(folder).chat_templates == {"default": "default", "tool_use": "tools"}


@pytest.mark.parametrize("array", [np.ones(2, np.complex64), np.ones(2, ">f4")])
def test_an_array_whose_dtype_no_file_has_is_refused_by_its_key(tmp_path, array):
    with pytest.raises(CheckpointError, match=f"b: expected an array of float64.*, got {array.dtype}"):
        checkpoint.save({"a": np.ones(2, np.float32), "b": array}, tmp_path, config={})
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(weights(), tmp_path, config={"x": 1})

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["verax.checkpoint.save"], "write_shards", interrupted)  # the function hides it
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"other": np.ones(2, np.float32)}, tmp_path, config={"x": 2})
    opened = Checkpoint.open(tmp_path)
    assert opened.config == {"x": 1}
    assert "norm.weight" in opened.names()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def run(code, tmp_path, **environment):
    program = textwrap.dedent(code).replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_each_device_of_a_mesh_gets_its_slice_and_a_misfit_is_refused(tmp_path):
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from verax import checkpoint
        from verax._compat import make_mesh
        from verax.errors import InvalidParameterError
        from verax.nn import Linear
        from verax.nn.parallel import divisions
        w = np.arange(96, dtype=np.float32).reshape(16, 6)
        opened = checkpoint.Checkpoint.open(checkpoint.save({"weight": w}, FOLDER, config={}))
        mesh = make_mesh((8,), ("tensor",))
        def load(divided):
            layer = nnx.eval_shape(lambda: Linear(6, 16, divided=divided, dtype=jnp.float32, rngs=nnx.Rngs(0)))
            return checkpoint.load_module(layer, opened, dtype=jnp.float32, mesh=mesh, divisions=divisions(layer))
        array = load("out").weight[...]
        for shard in array.addressable_shards:
            assert shard.data.shape == (2, 6)
            np.testing.assert_array_equal(shard.data, w[shard.index])
        assert len({s.device for s in array.addressable_shards}) == 8
        try:
            load("in")
        except InvalidParameterError as error:
            assert "weight: 6 inputs do not divide over 8 devices" in str(error)
            print("refused")
    """
    out = run(code, tmp_path, JAX_NUM_CPU_DEVICES="8")
    assert out == "refused\n"


# One copy of 300 MB of weights; of 31 MB, 9 in four bits and pieces of some 150, which all at once would be 500.
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("layers", "shape", "bits", "most"), [(36, (2048, 2048), None, 360e6), (1, (30000, 512), 4, 250e6)]
)
def test_loading_holds_one_copy_of_the_weights_and_quantising_little_more_than_it_makes(
    layers, shape, bits, most, tmp_path
):
    code = f"""
        import re, jax, jax.numpy as jnp
        from flax import nnx
        from verax import checkpoint
        from verax.nn import Linear
        class Stack(nnx.Module):
            def __init__(self):
                make = lambda: Linear({shape[1]}, {shape[0]}, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
                self.layers = nnx.List([make() for _ in range({layers})])
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        opened, abstract = checkpoint.Checkpoint.open(FOLDER), nnx.eval_shape(Stack)
        jax.jit(lambda x: jnp.round(x / 3).astype(jnp.int8))(jnp.ones(3)).block_until_ready()
        precision, before = {bits and (bits, 32)}, peak()
        model = checkpoint.load_module(abstract, opened, dtype=jnp.bfloat16, quantize=lambda name: precision)
        print(peak() - before)
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
    checkpoint.save({f"layers.{i}.weight": weight for i in range(layers)}, tmp_path, config={})
    assert float(run(code, tmp_path)) < most


def test_a_weight_quantised_in_pieces_equals_one_piece(tmp_path, monkeypatch):
    weight = np.random.default_rng(0).standard_normal((37, 64), np.float32)
    checkpoint.save({"weight": weight}, tmp_path, config={})
    abstract = nnx.eval_shape(lambda: Linear(64, 37, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    for at_once in (1, 64 * 5, 64 * 37, 1 << 22):
        monkeypatch.setattr(load, "QUANTIZED_AT_ONCE", at_once)
        for bits, group_size in ((8, None), (8, 64), (4, 32)):
            opened = checkpoint.Checkpoint.open(tmp_path)
            model = checkpoint.load_module(abstract, opened, dtype=None, quantize=lambda _: (bits, group_size))  # noqa: B023
            loaded, whole = model.weight.get_value(), quantize(jnp.asarray(weight), bits, group_size)
            assert (loaded.bits, loaded.group_size, loaded.shape) == (bits, group_size, (37, 64))
            np.testing.assert_array_equal(loaded.values, whole.values)
            np.testing.assert_array_equal(loaded.scales, whole.scales)


MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, hidden_size=64, tie_word_embeddings=False)
STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of the same arrays with a key for each matrix, and with a key for each stack."""
    stacked = tiny_checkpoint(tmp_path_factory.mktemp("moe") / "stacked", family="qwen3_moe", **MOE)
    single = tmp_path_factory.mktemp("moe") / "single"
    opened = Checkpoint.open(stacked)
    checkpoint.save(load_causal_lm(opened, dtype="float32"), single, config=opened.config, tokenizer_from=stacked)
    return stacked, single


def arrays_of(model):
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(theirs[name]), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_single_matrices_are_written_and_read_into_their_stack(folders):
    stacked, single = folders
    names = Checkpoint.open(single).names()
    assert STACK in Checkpoint.open(stacked).names()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert STACK not in names
    loaded = arrays_of(load_causal_lm(Checkpoint.open(single), dtype="bfloat16"))
    assert_equal(loaded, arrays_of(load_causal_lm(Checkpoint.open(stacked), dtype="bfloat16")))
    file = Checkpoint.open(single)
    expert = f"{STACK.removesuffix('.gate_up_proj')}.2."
    parts = [file.read(f"{expert}{name}.weight") for name in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(loaded[STACK][2], np.concatenate(parts).astype(jnp.bfloat16))
    assert loaded["model.layers.1.mlp.gate.weight"].dtype == jnp.float32


@pytest.mark.parametrize("quantization", ["int8", "int4", (8, 32)])
def test_experts_are_quantised_alike_from_both_and_stay_so_on_disk(folders, quantization, tmp_path):
    stacked, single = (Checkpoint.open(folder) for folder in folders)
    model = load_causal_lm(single, dtype="bfloat16", quantization=quantization)
    loaded = arrays_of(model)
    assert_equal(loaded, arrays_of(load_causal_lm(stacked, dtype="bfloat16", quantization=quantization)))
    assert isinstance(loaded[STACK], QuantizedWeight)
    assert loaded[STACK].shape == (4, 64, 64)
    plain = {name for name, value in loaded.items() if not isinstance(value, QuantizedWeight) and value.ndim > 1}
    assert plain == {"model.embed_tokens.weight", *(f"model.layers.{i}.mlp.gate.weight" for i in (0, 1))}
    checkpoint.save(model, tmp_path, config=single.config)
    written = Checkpoint.open(tmp_path)
    assert written.packed["model.layers.0.mlp.experts.1.down_proj.weight"].shape == (64, 32)
    assert written.config["quantization_config"]["ignore"] == [f"model.layers.{i}.mlp.gate" for i in (0, 1)]
    assert_equal(loaded, arrays_of(load_causal_lm(written, dtype="bfloat16")))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_stack_with_inputs_before_outputs_is_turned_and_written_back(quantization, tmp_path):
    sizes = dict(num_experts=4, num_experts_per_tok=2, intermediate_size=32, tie_word_embeddings=False)
    opened = Checkpoint.open(tiny_checkpoint(tmp_path / "a", family="gpt_oss", **sizes))
    model = load_causal_lm(opened, dtype="float32", quantization=quantization)
    loaded = arrays_of(model)
    assert opened.shape(STACK) == (4, 64, 64)
    checkpoint.save(model, tmp_path / "b", config=opened.config)
    assert_equal(loaded, arrays_of(load_causal_lm(Checkpoint.open(tmp_path / "b"), dtype="float32")))
    if quantization is None:
        np.testing.assert_array_equal(loaded[STACK], np.swapaxes(opened.read(STACK), 1, 2))
        np.testing.assert_array_equal(Checkpoint.open(tmp_path / "b").read(STACK), opened.read(STACK))
    else:
        assert isinstance(loaded[STACK], QuantizedWeight)


def test_packed_matrices_whose_rows_fill_no_whole_block_are_put_together(tmp_path):
    config = tiny_config("qwen3_moe", **{**MOE, "moe_intermediate_size": 24})
    checkpoint.save(random_weights(config), tmp_path / "plain", config=config)
    checkpoint.save(load_causal_lm(Checkpoint.open(tmp_path / "plain"), dtype="float32"), tmp_path / "a", config=config)
    opened = Checkpoint.open(tmp_path / "a")
    arrays, packed = {}, {}
    for name in opened.names():
        if re.search(r"experts\.\d+\.(gate|up)_proj", name):
            packed[name] = quantize(jnp.asarray(opened.read(name)), 4, 32)
            arrays |= compressed_tensors.entries(name, packed[name])
        else:
            arrays[name] = np.asarray(opened.read(name))
    scheme = compressed_tensors.quantization_config(packed.values())
    checkpoint.save(arrays, tmp_path / "b", config={**config, "quantization_config": scheme})
    stack = arrays_of(load_causal_lm(Checkpoint.open(tmp_path / "b"), dtype="float32"))[STACK]
    assert stack.shape == (4, 48, 64)
    expert = [packed[f"model.layers.1.mlp.experts.2.{name}.weight"].dequantize() for name in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(jax.tree.map(lambda part: part[2], stack).dequantize(), np.concatenate(expert))


def packed_experts(folder, target, pack, scheme):
    """A copy of a checkpoint with its experts packed, and their float arrays by key."""
    opened, rng = Checkpoint.open(folder), np.random.default_rng(0)
    arrays, floats = {}, {}
    for name in opened.names():
        weight = np.asarray(opened.read(name))
        if re.search(r"experts\.\d+\.", name):
            parts, floats[name] = pack(rng, *weight.shape)
            arrays |= {f"{name.removesuffix('.weight')}.{last}": part for last, part in parts.items()}
        else:
            arrays[name] = weight
    checkpoint.save(arrays, target, config={**opened.config, "quantization_config": scheme})
    return floats


@pytest.mark.parametrize(
    ("pack", "scheme"),
    [(awq, {"quant_method": "awq"}), (float8, {"quant_method": "fp8", "weight_block_size": [128, 128]})],
)
def test_packed_experts_of_published_layouts_are_put_together(folders, tmp_path, pack, scheme):
    floats = packed_experts(folders[1], tmp_path, pack, scheme)
    stack = arrays_of(load_causal_lm(Checkpoint.open(tmp_path), dtype="float32"))[STACK]
    keys = [f"{STACK.removesuffix('.gate_up_proj')}.2.{name}.weight" for name in ("gate_proj", "up_proj")]
    expected = np.concatenate([floats[key] for key in keys])
    np.testing.assert_allclose(jax.tree.map(lambda part: part[2], stack).dequantize(), expected, rtol=1e-6)


def test_an_experts_matrices_in_several_orders_of_inputs_are_refused(folders, tmp_path):
    pack = lambda rng, F, D: gptq(rng, F, D, act_order=D == 64)
    packed_experts(folders[1], tmp_path, pack, {"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="take their inputs in several orders"):
        load_causal_lm(Checkpoint.open(tmp_path), dtype="float32")


def changed(folder, target, change):
    """A copy of a checkpoint whose arrays `change` has changed."""
    opened = Checkpoint.open(folder)
    arrays = {name: np.asarray(opened.read(name)) for name in opened.names()}
    change(arrays)
    return Checkpoint.open(checkpoint.save(arrays, target, config=opened.config))


def test_a_missing_expert_and_one_of_another_shape_are_named(folders, tmp_path):
    key = "model.layers.0.mlp.experts.2.up_proj.weight"

    def without(arrays):
        del arrays[key]

    def narrower(arrays):
        arrays[key] = arrays[key][:24]

    with pytest.raises(CheckpointError, match=f"{re.escape(key)} missing"):
        load_causal_lm(changed(folders[1], tmp_path / "without", without), dtype="float32")
    with pytest.raises(
        CheckpointError, match=f"{re.escape(key)} has shape .24, 64., config.json's model needs .32, 64."
    ):
        load_causal_lm(changed(folders[1], tmp_path / "narrower", narrower), dtype="float32")


def test_a_norm_does_not_keep_the_memory_of_weights_that_are_dropped():
    memory = HostMemory()
    weight, norm = (memory.copy(np.ones(shape), np.dtype("float32")) for shape in ((512, 512), (512,)))
    chunk = weakref.ref(weight.base)
    del weight, memory  # as when weights are packed
    assert chunk() is None
    np.testing.assert_array_equal(norm, 1)


def test_an_array_of_xlas_moves_into_large_pages():
    memory, array = HostMemory(), jnp.arange(1 << 16, dtype=jnp.bfloat16).reshape(256, 256)
    moved = memory.moved(array)
    np.testing.assert_array_equal(moved, array)
    assert moved.devices() == array.devices()
    assert not moved.committed  # or programs would be compiled again
    assert moved.dtype == array.dtype
    beside = memory.empty((256, 256), np.dtype("float32"))  # the chunk's next array
    assert moved.unsafe_buffer_pointer() + moved.nbytes == beside.ctypes.data
    jax.jit(memory.moved)(array)  # traced: unchanged


def test_random_weights_keep_the_scale_of_what_they_multiply_and_differ_by_row():
    for name, shape, fan_in in (
        ("linear.weight", (400, 300), 300),
        ("conv.weight", (50, 6, 3, 3), 54),
        (STACK, (4, 64, 64), 64),
    ):
        assert random_weight(name, shape).std() == pytest.approx(fan_in**-0.5, rel=0.05)
    for name, middle in (("norm.weight", 1), ("norm.bias", 0), ("norm.gamma", 1)):
        weight = random_weight(name, (5000, 1, 1))
        assert weight.mean() == pytest.approx(middle, abs=0.02)
        assert weight.std() == pytest.approx(0.3, abs=0.02)
    assert 2 * DRAWN < 4099 * 500
    weight = random_weight("table.weight", (4099, 500), ml_dtypes.bfloat16)
    assert len(np.unique(weight.astype(np.float32), axis=0)) == len(weight)
    assert not np.allclose(random_weight("a.weight", (3, 4)), random_weight("a.weight", (3, 4), seed=1))
