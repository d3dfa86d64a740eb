"""The correctness parts: every example has arguments, and an implementation that is wrong or dies is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.bench import correctness


def test_every_example_has_arguments_that_its_implementations_take():
    rng = np.random.default_rng(0)
    for name, operation in ops.operations().items():
        for example in operation.examples:
            if sum(x.size for x in jax.tree.leaves(example.args) if hasattr(x, "size")) > 1 << 22:
                continue
            args = correctness.arguments_of(name, example, rng)
            leaves = zip(jax.tree.leaves(args), jax.tree.leaves(example.args), strict=True)
            assert all(np.shape(got) == np.shape(wanted) for got, wanted in leaves)
            assert operation.supporting(*args, **example.kwargs)


def test_implementations_are_compared_with_the_reference(monkeypatch):
    chosen = {name: ops.operations()[name] for name in ("rms_norm", "linear")}
    monkeypatch.setattr(ops, "operations", lambda: chosen)
    monkeypatch.setattr(correctness, "rehearsal_cases", lambda: ())
    with ops.use_implementations():
        rows = list(correctness.compare_operations(True))
    assert all(row["error"] == "" and max(row["errors"].values()) < 1e-5 for row in rows)
    assert "linear, 1 row" in [row["case"] for row in rows]  # pad_to_two_rows is there with and without the CPU kernels


def test_an_implementation_that_is_wrong_or_dies_is_an_error_of_its_row():
    def dies():
        raise RuntimeError("no kernel image")

    exact = jnp.ones((3, 2))
    calls = {"reference": lambda: exact, "fast": lambda: exact * 1.1, "other": dies, "odd": lambda: exact[:2]}
    row = correctness.compare("linear", calls, False)
    assert row["errors"]["fast"] == pytest.approx(0.1)
    for failure in (
        "fast is off by 0.1",
        "other: RuntimeError: no kernel image",
        "odd: ValueError: its output has shape",
    ):
        assert failure in row["error"]
    assert not correctness.compare("linear", {"reference": lambda: exact, "fast": lambda: exact * 1.01}, True)["error"]
    assert correctness.compare("linear", {"reference": dies}, False)["error"].startswith("reference: RuntimeError")
    integers = {"reference": lambda: jnp.asarray([1, 2, 3, 4]), "fast": lambda: jnp.asarray([1, 2, 3, 5])}
    assert correctness.compare("sample", integers, True)["errors"]["fast"] == 0.25
