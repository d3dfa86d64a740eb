"""Rotary frequencies: their last bits count, as positions of a hundred thousand multiply them."""

import numpy as np
import pytest

from verax.ops.rope import RotaryConfig


@pytest.mark.parametrize("theta", [1e4, 1.5e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_within_two_roundings_of_float64(theta, head_dim):
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    exact = theta**-exponents
    frequencies, _ = RotaryConfig(theta).frequencies(head_dim)
    assert np.abs(frequencies / exact - 1).max() < 1e-7
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "rope_theta": theta}
    frequencies, factor = RotaryConfig.from_hf({"rope_parameters": yarn}).frequencies(head_dim)
    assert frequencies[0] == 1
    assert frequencies[-1] == pytest.approx(exact[-1] / 8, rel=1e-7)
    assert factor == pytest.approx(0.1 * np.log(8) + 1)
