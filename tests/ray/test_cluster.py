import pytest

from verax.errors import InvalidParameterError
from verax.ray.cluster import actor_environment, check_gpus


@pytest.mark.parametrize("num_gpus", [0.5, -1, 1.5])
def test_a_part_of_a_gpu_is_refused(num_gpus):
    with pytest.raises(InvalidParameterError, match=r"^num_gpus: expected a whole number"):
        check_gpus(num_gpus)


def test_actors_share_the_caches_of_the_process_that_starts_them(monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", "/shared/cache")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    variables = actor_environment({"MORE": "1"})["env_vars"]
    assert (variables["VERAX_CACHE_DIR"], variables["MORE"]) == ("/shared/cache", "1")
    assert "HF_TOKEN" not in variables
