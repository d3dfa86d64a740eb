"""Weights of odd sizes by key, and files written without the code that is tested."""

import json

import numpy as np
from safetensors.numpy import save_file

SHAPES = {"embed.weight": (37, 7)} | {
    f"layers.{i}.{name}": shape
    for i in range(3)
    for name, shape in {"up.weight": (11, 7), "up.bias": (11,), "down.weight": (7, 11), "gain": ()}.items()
}


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


def assert_same(got, expected):
    """Same keys, dtypes, shapes and bits."""
    assert set(got) == set(expected)
    for key, value in expected.items():
        array = np.asarray(got[key])
        assert (key, array.dtype, array.shape) == (key, value.dtype, value.shape)
        assert array.tobytes() == value.tobytes(), key
