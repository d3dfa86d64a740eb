"""Damage to files for fuzz tests: values of JSON objects, their text, and bytes."""

import copy
import json

EXTREMES = [None, True, False, 0, -1, 1, 3, 10**12, 10**30, -(2**63), 0.0, -0.5, 1e-320, 1e30, 1e308, float("nan")]
EXTREMES += [
    float("inf"),
    "",
    "x",
    "4",
    "\0",
    "../../x",
    "\ud800",
    "x" * 10_000,
    [],
    [[]],
    [0],
    [None],
    ["x"],
    [-1, 1e30],
]
EXTREMES += [{}, {"x": 1}, {"content": 5}, {"rope_type": []}, {"type": "default"}, [1, 2, 3], [True], [{}]]


def places(value, path=()):
    """Paths of all values within a JSON value."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield from places(one, (*path, key))


def mutate_json(text, rng):
    """A JSON text with one value, key or piece of text changed; bytes."""
    value = json.loads(text)
    kind = rng.integers(10)
    if kind >= 8:
        return mutate_bytes(text.encode(), rng)
    if kind == 7:
        depth = int(rng.choice([3, 100, 100_000]))
        return text.replace(": ", ": " + "[" * depth, 1).encode()
    value = copy.deepcopy(value)
    path = list(places(value))[rng.integers(len(list(places(value))))]
    if not path:
        return json.dumps(EXTREMES[rng.integers(len(EXTREMES))]).encode()
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, new = path[-1], EXTREMES[rng.integers(len(EXTREMES))]
    if kind == 6:
        del parent[key]
    elif kind == 5 and isinstance(parent, dict):
        added = [*OPTIONAL, f"{key}_"]
        parent[added[rng.integers(len(added))]] = new
    elif kind == 4 and isinstance(parent, list):
        parent.extend([parent[key]] * int(rng.choice([1, 50])))
    else:
        parent[key] = new
    return json.dumps(value).encode()


OPTIONAL = ["rope_scaling", "layer_types", "quantization_config", "text_config", "vision_config", "use_sliding_window"]
OPTIONAL += ["partial_rotary_factor", "num_experts", "added_tokens_decoder", "extra_special_tokens", "attn_scales"]
OPTIONAL += ["additional_special_tokens", "temperature", "top_k", "do_sample", "pooling_mode", "pooling_mode_cls_token"]
OPTIONAL += [
    "max_seq_length",
    "path",
    "kind",
    "pipeline",
    "inject_sample_info",
    "window_size",
    "model_type",
    "is_decoder",
]
"""Keys that the readers take and the built-in files lack."""


def mutate_bytes(content, rng):
    """Bytes with a cut, flips, a piece left out or repeated, or a number set to an extreme."""
    content = bytearray(content)
    at = int(rng.integers(len(content)))
    kind = rng.integers(6)
    if kind == 0:
        return bytes(content[:at])
    if kind == 1:
        for place in rng.integers(0, len(content), int(rng.integers(1, 6))):
            content[place] ^= int(rng.integers(1, 256))
    elif kind == 2:
        del content[at : at + int(rng.integers(1, 40))]
    elif kind == 3:
        content[at:at] = content[at : at + int(rng.integers(1, 40))]
    elif kind == 4:
        width = int(rng.choice([1, 2, 4, 8]))
        number = int(rng.choice([0, 1, 2, 127, 255])) if rng.integers(2) else 256**width - 1 - int(rng.integers(3))
        content[at : at + width] = (number % 256**width).to_bytes(width, "little")
    else:
        content[at : at + 8] = (int(rng.integers(2**62))).to_bytes(8, "little")
    return bytes(content)
