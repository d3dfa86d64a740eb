"""The training loop on a small regression: it learns, resumes exactly, and never loses a state; and the losses."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from verax import ops
from verax.errors import CheckpointError
from verax.train.loop import Schedule, train
from verax.train.loss import rounded_gradient_linear, weighted_next_token_loss

SCHEDULE = Schedule(steps=40, peak_learning_rate=0.2, warmup_steps=5)


def loss(params, batch):
    return jnp.mean((batch["tokens"] @ params["weight"] + params["bias"] - batch["target"]) ** 2)


def batches(start):
    step = start
    while True:
        rng = np.random.default_rng(step)
        x = rng.standard_normal((16, 4)).astype(np.float32)
        yield {"tokens": x, "target": x @ np.arange(4, dtype=np.float32) + 2}
        step += 1


def fresh():
    return {"weight": jnp.zeros(4), "bias": jnp.zeros(())}


def test_the_running_mean_is_of_late_parameters_and_resumes_exactly(tmp_path):
    seen = []

    def watched(params, batch):
        jax.debug.callback(lambda bias: seen.append(float(bias)), params["bias"], ordered=True)
        return loss(params, batch)

    whole = train(watched, fresh(), batches, SCHEDULE, tmp_path / "whole", average=0.9, show_progress=False)
    jax.effects_barrier()
    mean = 0.0
    after = [*seen[1:], float(train(loss, fresh(), batches, SCHEDULE, tmp_path / "last", show_progress=False)["bias"])]
    for step, bias in enumerate(after):
        keep = min(0.9, (1 + step) / (10 + step))
        mean = keep * mean + (1 - keep) * bias
    np.testing.assert_allclose(whole["bias"], mean, rtol=1e-5)
    train(loss, fresh(), batches, SCHEDULE, tmp_path / "cut", average=0.9, stop_at=17, show_progress=False)
    resumed = train(loss, fresh(), batches, SCHEDULE, tmp_path / "cut", average=0.9, resume=True, show_progress=False)
    np.testing.assert_array_equal(resumed["bias"], whole["bias"])


def test_resuming_needs_a_state_of_the_same_run(tmp_path):
    with pytest.raises(CheckpointError, match="state: no training state"):
        train(loss, fresh(), batches, SCHEDULE, tmp_path, resume=True, show_progress=False)
    train(loss, fresh(), batches, SCHEDULE, tmp_path, stop_at=3, show_progress=False)
    with pytest.raises(CheckpointError, match="made with steps 40, now 50"):
        train(loss, fresh(), batches, Schedule(50, 0.2, 5), tmp_path, resume=True, show_progress=False)
    larger = {"weight": jnp.zeros(5), "bias": jnp.zeros(())}
    with pytest.raises(CheckpointError, match="other sizes"):
        train(loss, larger, batches, SCHEDULE, tmp_path, resume=True, show_progress=False)


def test_a_state_that_was_not_written_to_its_end_does_not_count(tmp_path):
    whole = train(loss, fresh(), batches, SCHEDULE, tmp_path / "whole", show_progress=False)
    train(loss, fresh(), batches, SCHEDULE, tmp_path / "cut", stop_at=5, show_progress=False)
    (saved,) = (tmp_path / "cut" / "state").iterdir()
    shutil.copytree(saved, saved.with_name("9.orbax-checkpoint-tmp"))  # as a process that is killed leaves it
    resumed = train(loss, fresh(), batches, SCHEDULE, tmp_path / "cut", resume=True, show_progress=False)
    np.testing.assert_array_equal(resumed["weight"], whole["weight"])


@pytest.mark.parametrize("part", ["run/metadata", "state/**/manifest.ocdbt"])
def test_a_damaged_state_is_refused(part, tmp_path):
    train(loss, fresh(), batches, SCHEDULE, tmp_path, stop_at=3, show_progress=False)
    for file in (tmp_path / "state" / "3").glob(part):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CheckpointError, match="state/3: this state cannot be read"):
        train(loss, fresh(), batches, SCHEDULE, tmp_path, resume=True, show_progress=False)


def test_steps_that_were_lost_with_an_interruption_are_logged_once(tmp_path):
    train(loss, fresh(), batches, SCHEDULE, tmp_path, stop_at=10, show_progress=False)
    with (tmp_path / "log.jsonl").open("a") as log:  # as a run that died between two states leaves it
        log.write('{"step": 20, "loss": 9.0}\n{"step": 21, "lo')
    train(loss, fresh(), batches, SCHEDULE, tmp_path, resume=True, show_progress=False)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30, 40]


def test_a_run_that_left_no_state_leaves_nothing_in_the_log_of_the_next(tmp_path):
    def failing(start):
        yield next(batches(start))
        raise KeyboardInterrupt

    options = {"save_every": 5, "log_every": 1, "stop_at": 2, "show_progress": False}
    with pytest.raises(KeyboardInterrupt):
        train(loss, fresh(), failing, SCHEDULE, tmp_path, validate=lambda params: 7.0, **options)
    train(loss, fresh(), batches, SCHEDULE, tmp_path, validate=lambda params: 3.0, **options)
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry.get("validation_loss")) for entry in entries] == [(0, 3.0), (1, None), (2, 3.0)]


def test_rounded_gradients_match_the_plain_form_up_to_rounding():
    rng = np.random.default_rng(1)
    x, bias = (
        jnp.asarray(rng.standard_normal((3, 4, 33)), jnp.float32),
        jnp.asarray(rng.standard_normal(17), jnp.float32),
    )
    weight = jnp.asarray(rng.standard_normal((17, 33)), jnp.float32)

    def gradients(implementation, dtype):
        def loss(x, weight, bias):
            with ops.use_implementations(linear=implementation):
                return jnp.sum(jnp.sin(ops.linear(x, weight.astype(dtype), bias)))

        return jax.grad(loss, (0, 1, 2))(x, weight, bias)

    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        for got, exact in zip(gradients(rounded_gradient_linear, dtype), gradients("reference", dtype), strict=True):
            assert np.linalg.norm(got - exact) < bound * np.linalg.norm(exact)


def test_weighted_loss_is_the_mean_over_what_is_trained_in_parts_or_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((2, 12, 6)), rng.standard_normal((9, 6))
    targets, weights = rng.integers(0, 9, (2, 12)), rng.random((2, 12)) * (rng.random((2, 12)) < 0.5)

    def compute(head):
        arrays = [jnp.asarray(x, jnp.float32) for x in (hidden, weights)]
        return weighted_next_token_loss(lambda h: h @ head.T, arrays[0], jnp.asarray(targets), arrays[1])

    expected = (optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, targets) * weights).sum()
    once, gradient = jax.value_and_grad(compute)(jnp.asarray(head, jnp.float32))
    np.testing.assert_allclose(once, expected, rtol=1e-5)
    monkeypatch.setattr("verax.train.loss.MAX_SCORES", 2 * 9 * 4)  # four tokens of each row
    parts, parted = jax.value_and_grad(compute)(jnp.asarray(head, jnp.float32))
    np.testing.assert_allclose(parts, expected, rtol=1e-5)
    np.testing.assert_allclose(parted, gradient, rtol=1e-4, atol=1e-6)
