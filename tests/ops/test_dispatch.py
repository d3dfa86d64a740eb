"""Choice of an implementation: by the call, by name, by environment; a warning when the choice is slow."""

import logging

import jax.numpy as jnp
import pytest

from verax import ops
from verax.errors import InvalidParameterError
from verax.ops._dispatch import _REGISTRY, Operation


@pytest.fixture
def doubled():
    def double_it(x):
        """2 x."""
        return 2 * x

    op = Operation(double_it, {})
    op.implementation("shifted", platforms=("cpu",), accepts=lambda x: x > 10, slow_on={"cpu": "it is for the test"})(
        lambda x: x + x
    )
    op.implementation("elsewhere", platforms=("tpu",))(lambda x: -1)
    yield op
    del _REGISTRY["double_it"]


def test_the_newest_form_that_takes_the_call_is_chosen(doubled):
    assert doubled.select(3).name == "reference"
    assert doubled.select(30).name == "shifted"


def test_a_slow_choice_says_so_once(doubled, caplog):
    with caplog.at_level(logging.WARNING, logger="verax.ops"):
        doubled(30)
        doubled(40)
    assert [record.message for record in caplog.records] == [
        "double_it runs its shifted implementation on cpu: it is for the test"
    ]


def test_a_form_can_be_named(doubled):
    with ops.use_implementations(double_it="elsewhere"):
        assert doubled(3) == -1
    assert doubled(3) == 6


def test_a_form_that_accepts_nothing_is_only_taken_by_name(doubled):
    doubled.implementation("own", accepts=None)(lambda x: -2)
    assert doubled(3) == 6
    with ops.use_implementations(double_it="own"):
        assert doubled(3) == -2


def test_nested_choices_add_up(doubled):
    with ops.use_implementations(double_it="elsewhere"), ops.use_implementations(linear="reference"):
        assert doubled(3) == -1
        assert ops.linear.select(jnp.ones((1, 2)), jnp.ones((3, 2))).name == "reference"


def test_the_environment_chooses(doubled, monkeypatch):
    monkeypatch.setenv("VERAX_IMPLEMENTATIONS", "double_it=elsewhere")
    assert doubled(3) == -1


@pytest.mark.parametrize(
    ("choice", "named"), [({"nothing": "reference"}, "nothing"), ({"linear": "magic"}, "pad_to_two_rows")]
)
def test_unknown_names_are_refused_with_what_there_is(choice, named):
    with pytest.raises(InvalidParameterError, match=named), ops.use_implementations(**choice):
        pass


def test_a_wrong_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VERAX_IMPLEMENTATIONS", "linear")
    with pytest.raises(InvalidParameterError, match="VERAX_IMPLEMENTATIONS"):
        ops.linear(jnp.ones((2, 2)), jnp.ones((3, 2)))
