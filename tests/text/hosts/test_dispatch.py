"""Dispatches as messages."""

import numpy as np
import pytest

from verax.text.hosts import Dispatch
from verax.text.step.step import StepShape


@pytest.mark.parametrize("size", [5, 40_000])
def test_a_message_gives_the_dispatch_again(size):
    rows, masks = np.arange(8, dtype=np.int32).reshape(2, 4), np.full((2, size), -1, np.int32)
    dispatch = Dispatch.decode(Dispatch.of("sample", rows, masks).encode())
    assert (dispatch.program, dispatch.shape) == ("sample", None)
    for array, sent in zip(dispatch.unpack(), (rows, masks), strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, sent)


def test_a_step_has_its_bucket():
    shape = StepShape(2, 32, decode=False, adapters=True)
    assert Dispatch.decode(Dispatch.of("step", np.zeros(3, np.int32), shape=shape).encode()).shape == shape


def test_the_padding_of_an_admission_is_not_sent():
    row = np.zeros(40_960, np.int32)
    row[:20] = np.arange(20)
    assert len(Dispatch.of("admit", row).encode()) < 1_000
