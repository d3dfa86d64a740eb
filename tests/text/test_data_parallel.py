"""Replicas on devices of their own: the tokens of one engine, whichever replica serves, and no device is shared."""

import pytest

from tests.support.devices import run_on_devices
from verax import LLM
from verax.errors import InvalidParameterError


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Facts of one engine, of two replicas, and of two replicas of two devices each."""
    return run_on_devices(4, "tests.support.data_parallel", tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("case", ["two", "two of two"])
def test_answers_equal_one_engine(found, case):
    one, replicas = found["one"], found[case]
    expected = one["answers"][: len(replicas["answers"])]
    assert replicas["answers"] == expected
    assert all(len(set(answer[1])) > 4 for answer in expected[:5])
    # Requests without a seed draw one in the order in which they come.
    assert expected[2] != expected[3]
    for i, answer in enumerate(replicas["collected"]):
        assert answer == expected[i] or i in (2, 3)


@pytest.mark.parametrize("case", ["two", "two of two"])
def test_every_replica_serves(found, case):
    before, later = found[case]["generated"], found[case]["generated_later"]
    assert min(before) >= 32
    assert all(after > count for count, after in zip(before, later, strict=True))


def test_each_replica_has_devices_of_its_own(found):
    assert found["one"]["devices"] == [[0]]
    for case, devices in {"two": [[0], [1]], "two of two": [[0, 1], [2, 3]]}.items():
        assert found[case]["devices"] == found[case]["cache_devices"] == devices
    assert found["two"]["cache"] == f"{found['one']['cache']} on each of 2 replicas"
    assert (found["one"]["slots"], found["two"]["slots"]) == (2, 4)


@pytest.mark.parametrize("case", ["one", "two", "two of two"])
def test_nothing_compiles_after_the_start(found, case):
    before, after = found[case]["compiled"]
    assert before == after


def test_more_replicas_than_devices_are_refused_with_the_way_to_virtual_ones(tiny_folder):
    wanted = r"^data_parallel_size: 256 replicas of tensor_parallel_size 2 need 512 devices, .*JAX_NUM_CPU_DEVICES=512"
    with pytest.raises(InvalidParameterError, match=wanted):
        LLM(tiny_folder, data_parallel_size=256, tensor_parallel_size=2)
    with pytest.raises(InvalidParameterError, match="data_parallel_size: expected a whole number of at least 1"):
        LLM(tiny_folder, data_parallel_size=0)
