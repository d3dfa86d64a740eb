"""Training on eight devices: the same as on one. A process of its own, for its eight devices."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from verax._compat import make_mesh
from verax.train.loop import AXES, Schedule, batch_sharding, train

assert jax.device_count() == 8
folder = Path(sys.argv[1])
schedule = Schedule(steps=12, peak_learning_rate=0.1, warmup_steps=2)
rng = np.random.default_rng(0)
fresh = lambda: {"inner": jnp.ones((8, 12)), "head": jnp.ones((12, 3)) / 7, "bias": jnp.zeros(3)}


def loss(params, batch):
    noise = 0.01 * jax.random.normal(jax.random.key(batch["seed"]), batch["tokens"].shape)
    y = jax.nn.silu((batch["tokens"] + noise) @ params["inner"]) @ params["head"] + params["bias"]
    return jnp.mean((y - batch["tokens"][:, :3]) ** 2)


def batches(start):
    for step in range(start, 100):
        rows = 16 if step % 2 else 5  # five do not divide by eight
        x = np.random.default_rng(step).standard_normal((rows, 8)).astype(np.float32)
        yield {"tokens": x, "seed": np.asarray(step, np.uint32)}


def run(name, mesh, **options):
    mesh = mesh and make_mesh(mesh, AXES, jax.devices()[: mesh[0] * mesh[1]])
    return train(loss, fresh(), batches, schedule, folder / name, mesh=mesh, average=0.9, show_progress=False,
                 **options)


one = run("one", None)
for mesh in ((8, 1), (2, 4)):
    many = run(str(mesh), mesh)
    for name in one:
        np.testing.assert_allclose(many[name], one[name], rtol=2e-4, atol=2e-5)
assert len({str(shard.index) for shard in run("parts", (1, 4), stop_at=1)["inner"].addressable_shards}) == 4

# Interrupted on eight devices, ended on one.
run("moved", (2, 4), stop_at=7)
for name, value in run("moved", None, resume=True).items():
    np.testing.assert_allclose(value, one[name], rtol=2e-4, atol=2e-5)

spec = batch_sharding(make_mesh((2, 4), AXES), next(batches(1)))
assert spec["tokens"].shard_shape((16, 8)) == (2, 8) and spec["seed"].is_fully_replicated
print("equal")
"""


def test_several_devices_train_as_one_does(tmp_path):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=root, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "equal"
