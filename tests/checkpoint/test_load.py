"""Weights into modules: every misfit is named, every dtype converts, memory stays at one copy, meshes get slices."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.checkpoint.small import raw_file
from verax import checkpoint
from verax.checkpoint import Checkpoint, load, load_module
from verax.checkpoint.load import DRAWN, random_weight
from verax.errors import CheckpointError
from verax.nn import Linear, RMSNorm
from verax.ops import quantize


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Linear(5, 3, bias=True, dtype=jnp.float32, rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(5, eps=1e-6, dtype=jnp.float32)


ABSTRACT = nnx.eval_shape(lambda: Pair(nnx.Rngs(0)))


def weights(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"norm.weight": (5,)}
    for i in range(2):
        shapes |= {f"layers.{i}.weight": (3, 5), f"layers.{i}.bias": (3,)}
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def saved(folder, arrays, **options):
    return Checkpoint.open(checkpoint.save(arrays, folder, config={}, **options))


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.bfloat16, jnp.float32])
def test_every_float_type_loads_into_every_other(tmp_path, stored, wanted):
    arrays = weights(stored)
    model = load_module(ABSTRACT, saved(tmp_path, arrays), dtype=wanted)
    assert model.layers[1].weight[...].dtype == wanted
    np.testing.assert_array_equal(model.layers[1].weight[...], arrays["layers.1.weight"].astype(wanted))


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


def test_missing_weights_are_named_all_at_once(tmp_path):
    arrays = weights()
    del arrays["layers.0.bias"], arrays["norm.weight"]
    with pytest.raises(CheckpointError, match=r"2 weights \(.*layers\.0\.bias.*norm\.weight.*\) missing"):
        load_module(ABSTRACT, saved(tmp_path, arrays), dtype=jnp.float32)


def test_unexpected_weights_are_named_with_their_file_unless_ignored(tmp_path):
    opened = saved(tmp_path, {**weights(), "rotary_emb.inv_freq": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"rotary_emb\.inv_freq unexpected \(in model\.safetensors\)"):
        load_module(ABSTRACT, opened, dtype=jnp.float32)
    load_module(ABSTRACT, opened, dtype=jnp.float32, ignore=[r"inv_freq$"])


def test_a_wrong_shape_and_a_wrong_kind_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: norm\.weight has shape \[6\], .* needs \[5\]"):
        load_module(ABSTRACT, saved(tmp_path, {**weights(), "norm.weight": np.ones(6, np.float32)}), dtype=jnp.float32)
    with pytest.raises(CheckpointError, match=r"norm\.weight has dtype int32"):
        load_module(ABSTRACT, saved(tmp_path, {**weights(), "norm.weight": np.ones(5, np.int32)}), dtype=jnp.float32)


def test_progress_counts_bytes_up_to_all(tmp_path):
    seen = []
    load_module(ABSTRACT, saved(tmp_path, weights()), dtype=jnp.float32, progress=lambda d, t: seen.append((d, t)))
    assert seen[-1] == (4 * 41, 4 * 41)
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


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(weights(), tmp_path, config={"x": 1})

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["verax.checkpoint.save"], "save_file", interrupted)  # the function hides it
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"other": np.ones(2, np.float32)}, tmp_path, config={"x": 2})
    opened = Checkpoint.open(tmp_path)
    assert opened.config == {"x": 1}
    assert "norm.weight" in opened.names()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_files_of_an_earlier_save_do_not_stay(tmp_path):
    checkpoint.save(weights(), tmp_path, config={}, max_shard_bytes=64)
    checkpoint.save(weights(), tmp_path, config={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path):
    checkpoint.save(weights(), tmp_path, config={})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy_of_the_weights(tmp_path):
    code = """
        import re, jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from verax import checkpoint
        from verax.nn import Linear
        class Stack(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.layers = nnx.List([Linear(2048, 2048, dtype=jnp.bfloat16, rngs=rngs) for _ in range(36)])
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        opened = checkpoint.Checkpoint.open(FOLDER)
        abstract = nnx.eval_shape(Stack)
        jnp.ones(3).block_until_ready()
        before = peak()
        model = checkpoint.load_module(abstract, opened, dtype=jnp.bfloat16)
        print((peak() - before) / opened.nbytes)
    """
    arrays = {f"layers.{i}.weight": np.full((2048, 2048), i, jnp.bfloat16) for i in range(36)}
    checkpoint.save(arrays, tmp_path, config={})
    assert float(run(code, tmp_path)) < 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_quantising_while_loading_needs_little_more_than_what_it_makes(tmp_path):
    code = """
        import re, jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from verax import checkpoint
        from verax.nn import Linear
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        opened = checkpoint.Checkpoint.open(FOLDER)
        abstract = nnx.eval_shape(lambda: Linear(512, 30000, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        jax.jit(lambda x: jnp.round(x / 3).astype(jnp.int8))(jnp.ones(3)).block_until_ready()
        before = peak()
        model = checkpoint.load_module(abstract, opened, dtype=jnp.bfloat16, quantize=lambda name: (4, 32))
        print((peak() - before) / 1e6)
    """
    rng = np.random.default_rng(0)
    checkpoint.save({"weight": rng.standard_normal((30000, 512), np.float32).astype(jnp.bfloat16)}, tmp_path, config={})
    # The weight takes 9 MB in four bits and its pieces some 150; all at once, 500.
    assert float(run(code, tmp_path)) < 250


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


def test_matrices_keep_the_scale_of_what_they_multiply():
    x = np.random.default_rng(1).standard_normal((8, 300), np.float32)
    assert abs(np.std(x @ random_weight("linear.weight", (400, 300)).T) - 1) < 0.05
    assert abs(random_weight("conv.weight", (50, 6, 3, 3)).std() - 54**-0.5) < 0.01


def test_norms_are_around_one_and_biases_around_zero():
    for name, middle in (("norm.weight", 1), ("norm.bias", 0), ("norm.gamma", 1)):
        weight = random_weight(name, (5000, 1, 1))
        assert abs(weight.mean() - middle) < 0.02
        assert abs(weight.std() - 0.3) < 0.02


def test_rows_of_a_large_matrix_differ():
    weight = random_weight("table.weight", (4099, 500), ml_dtypes.bfloat16)
    assert weight.shape == (4099, 500)
    assert weight.dtype == ml_dtypes.bfloat16
    assert len(weight) * 500 > 2 * DRAWN
    assert len(np.unique(weight.astype(np.float32), axis=0)) == len(weight)


def test_a_weight_is_of_its_name_and_seed_alone():
    weight = random_weight("a.weight", (3, 4))
    np.testing.assert_array_equal(weight, random_weight("a.weight", (3, 4)))
    assert not np.allclose(weight, random_weight("b.weight", (3, 4)))
    assert not np.allclose(weight, random_weight("a.weight", (3, 4), seed=1))
