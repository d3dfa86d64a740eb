"""Random weights: their scale, and that no two parts of them are alike."""

import ml_dtypes
import numpy as np

from verax.checkpoint.load import DRAWN, random_weight


def test_matrices_keep_the_scale_of_what_they_multiply():
    x = np.random.default_rng(1).standard_normal((8, 300), np.float32)
    assert abs(np.std(x @ random_weight("linear.weight", (400, 300)).T) - 1) < 0.05
    assert abs(random_weight("conv.weight", (50, 6, 3, 3)).std() - 54**-0.5) < 0.01


def test_norms_are_around_one_and_biases_around_zero():
    for name, middle in (("norm.weight", 1), ("norm.bias", 0), ("norm.gamma", 1)):
        weight = random_weight(name, (5000, 1, 1))
        assert abs(weight.mean() - middle) < 0.02
        assert abs(weight.std() - 0.3) < 0.02


def test_rows_of_a_large_matrix_differ():
    weight = random_weight("table.weight", (4099, 500), ml_dtypes.bfloat16)
    assert weight.shape == (4099, 500)
    assert weight.dtype == ml_dtypes.bfloat16
    assert len(weight) * 500 > 2 * DRAWN
    assert len(np.unique(weight.astype(np.float32), axis=0)) == len(weight)


def test_a_weight_is_of_its_name_and_seed_alone():
    weight = random_weight("a.weight", (3, 4))
    np.testing.assert_array_equal(weight, random_weight("a.weight", (3, 4)))
    assert not np.allclose(weight, random_weight("b.weight", (3, 4)))
    assert not np.allclose(weight, random_weight("a.weight", (3, 4), seed=1))
