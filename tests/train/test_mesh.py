"""Training on eight devices: the same as on one. As a program: the runs, on its eight devices."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.devices import run_on_devices
from verax.train.loop import Schedule, batch_sharding, fully_sharded, train

CLOSE = dict(rtol=2e-4, atol=2e-5)


def loss(params, batch):
    noise = 0.01 * jax.random.normal(jax.random.key(batch["seed"]), batch["tokens"].shape)
    y = jax.nn.silu((batch["tokens"] + noise) @ params["inner"]) @ params["head"] + params["bias"]
    return jnp.mean((y - batch["tokens"][:, :3]) ** 2)


def batches(start):
    for step in range(start, 100):
        rows = 16 if step % 2 else 5  # five do not divide by eight
        x = np.random.default_rng(step).standard_normal((rows, 8)).astype(np.float32)
        yield {"tokens": x, "seed": np.asarray(step, np.uint32)}


def run(folder, devices=1, **options):
    params = {"inner": jnp.ones((8, 12)), "head": jnp.ones((12, 3)) / 7, "bias": jnp.zeros(3)}
    schedule = Schedule(steps=12, peak_learning_rate=0.1, warmup_steps=2)
    options |= {"mesh": fully_sharded(devices), "average": 0.9, "show_progress": False}
    return train(loss, params, batches, schedule, folder, **options)


def main(folder):
    """Assert that eight devices train as one does, and that a run may change its devices."""
    one = run(folder / "one")
    moved = folder / "moved"
    parts = run(moved, 4, stop_at=7)["inner"].addressable_shards
    for other in (run(folder / "eight", 8), run(moved, resume=True)):
        for name in one:
            np.testing.assert_allclose(other[name], one[name], **CLOSE)
    spec = batch_sharding(fully_sharded(8), next(batches(1)))
    assert spec["seed"].is_fully_replicated
    print(json.dumps([len({str(part.index) for part in parts}), spec["tokens"].shard_shape((16, 8))]))


def test_several_devices_train_as_one_does(tmp_path):
    assert run_on_devices(8, __name__, tmp_path) == [4, [2, 8]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
