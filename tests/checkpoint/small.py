"""A small module with odd sizes, its weights by key, and files written without the code that is tested."""

import json

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file


class Linear(nnx.Module):
    def __init__(self, inside, outside, dtype, bias=True):
        self.weight = nnx.Param(jnp.zeros((outside, inside), dtype))
        self.bias = nnx.Param(jnp.zeros(outside, dtype)) if bias else None


class Block(nnx.Module):
    def __init__(self, dtype):
        self.up = Linear(7, 11, dtype)
        self.down = Linear(11, 7, dtype, bias=False)
        self.gain = nnx.Param(jnp.ones((), jnp.float32))  # pinned, whatever dtype the rest has


class Small(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.embed = Linear(7, 37, dtype, bias=False)
        self.layers = nnx.List([Block(dtype) for _ in range(3)])


SHAPES = {"embed.weight": (37, 7)} | {
    f"layers.{i}.{name}": shape
    for i in range(3)
    for name, shape in {"up.weight": (11, 7), "up.bias": (11,), "down.weight": (7, 11), "gain": ()}.items()
}


def abstract(dtype=jnp.float32):
    return nnx.eval_shape(lambda: Small(dtype))


def weights(dtype=np.float32, seed=0):
    draw = np.random.default_rng(seed)
    return {key: np.asarray(draw.standard_normal(shape)).astype(dtype) for key, shape in SHAPES.items()}


def write(folder, tensors, *, shards=1, config=None):
    """A checkpoint folder by the safetensors library; `shards` above 1 deals the keys out in turn, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "small"}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {key: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, key in enumerate(tensors)}
    for name in set(weight_map.values()):
        save_file({key: tensors[key] for key in tensors if weight_map[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def raw_file(path, header, data=b""):
    """A safetensors file byte by byte: `header` as an object, or as the bytes to put there."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def by_key(module):
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module))}


def assert_same(got, expected):
    """Same keys, dtypes, shapes and bits."""
    assert set(got) == set(expected)
    for key, value in expected.items():
        array = np.asarray(got[key])
        assert (key, array.dtype, array.shape) == (key, value.dtype, value.shape)
        assert array.tobytes() == value.tobytes(), key
