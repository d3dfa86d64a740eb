import os
import sys
import types

import pytest

from verax.errors import InvalidParameterError, VeraxError
from verax.ray.cluster import actor_environment, check_gpus, start_ray


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


@pytest.fixture
def fake_ray(monkeypatch):
    """A Ray that notes how it is started."""
    fake = types.ModuleType("ray")
    fake.started = []
    fake.is_initialized = lambda: bool(fake.started)
    fake.init = lambda **options: fake.started.append(options)
    fake.shutdown = fake.started.clear
    constants = types.ModuleType("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTERS_ENV_VAR = "RAY_ENABLE_TEST"
    for name, module in {"ray": fake, "ray._private.ray_constants": constants}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "RAY_ENABLE_TEST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return fake


def test_ray_is_started_once_without_a_dashboard_and_without_reports(fake_ray):
    start_ray(num_cpus=3)
    start_ray(num_cpus=5)
    assert fake_ray.started == [{"num_cpus": 3, "include_dashboard": False, "log_to_driver": False}]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert sys.modules["ray._private.ray_constants"].ENABLE_RAY_CLUSTER is False


def test_a_cluster_is_connected_to_as_it_is(fake_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    start_ray(num_cpus=3)
    assert fake_ray.started == [{"log_to_driver": False}]


def test_a_ray_that_does_not_start_is_one_error(fake_ray):
    def fail(**options):
        raise Exception("the node timed out")

    fake_ray.init = fail
    with pytest.raises(VeraxError, match=r"^ray: it did not start on this machine.*timed out"):
        start_ray()
