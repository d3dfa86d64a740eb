"""Implementations become functions of a program, which equal calls share."""

import jax
import jax.numpy as jnp
import pytest

from verax import ops
from verax.ops._dispatch import _REGISTRY, Operation

X = jnp.arange(6.0)


@pytest.fixture
def scaled():
    """An operation, and the calls that were traced."""
    traced = []

    def scale_it(x, factor=2, *, by=None):
        traced.append((x.shape, factor))
        return x * factor if by is None else x * by(factor)

    yield Operation(scale_it), traced
    del _REGISTRY["scale_it"]


def test_equal_calls_are_traced_once_and_are_one_function_of_the_program(scaled):
    op, traced = scaled
    program = jax.jit(lambda x: op(op(op(x))) + op(x[:2]).sum()).lower(X)
    assert traced == [((6,), 2), ((2,), 2)]
    assert program.as_text().count("@scale_it") == 2 + 4  # definitions and calls
    assert (program.compile()(X) == 8 * X + 2).all()


@pytest.mark.parametrize("factor", [3, 2.0, True])
def test_another_value_or_the_same_of_another_type_is_traced_for_itself(scaled, factor):
    op, traced = scaled
    first, second = jax.jit(lambda x: (op(x.astype(int)), op(x.astype(int), factor)))(X)
    assert traced == [((6,), 2), ((6,), factor)]
    assert (first == 2 * X).all()
    assert (second == X * factor).all()
    assert second.dtype == (X.astype(int) * factor).dtype


def test_calls_with_other_arguments_or_without_a_traced_array_are_not_shared(scaled):
    op, traced = scaled
    for _ in range(2):
        assert (op(X) == 2 * X).all()
        assert (jax.jit(lambda x: op(x, by=lambda factor: factor + 1))(X) == 3 * X).all()
    assert len(traced) == 4


def test_calls_are_traced_again_for_other_choices_and_after_a_registration(scaled, monkeypatch):
    op, _ = scaled

    @Operation
    def outer_it(x):
        return op(x)

    def run():
        return float(jax.jit(lambda x: outer_it(x))(X)[1])

    try:
        assert run() == 2
        with ops.use_implementations(scale_it=lambda x: x * 5):
            assert run() == 5
        op.implementation("other")(lambda x: x * 7)
        assert run() == 7
        monkeypatch.setenv("VERAX_IMPLEMENTATIONS", "scale_it=reference")
        assert run() == 2
    finally:
        del _REGISTRY["outer_it"]


def test_a_function_in_an_operations_place_may_see_values_of_the_program_around_it(scaled):
    op, _ = scaled

    def around(x):
        with ops.use_implementations(scale_it=lambda y: y * x.sum()):
            return op(x)

    for x in (X, 2 * X):
        assert (jax.jit(around)(x) == x * x.sum()).all()


def test_gradients_go_through_the_functions(scaled):
    op, _ = scaled
    assert jax.jit(jax.grad(jax.grad(lambda x: op(op(x) ** 2))))(3.0) == 16
