"""The cluster, the processes of its actors and the deployment, without a Ray that runs."""

import sys
import threading
import types

import pytest

from verax.errors import InvalidParameterError, VeraxError
from verax.ray import cluster
from verax.ray.cluster import actor_environment, check_actors, start_ray


@pytest.mark.parametrize(("bounds", "found"), [(1, (1, 1)), (3, (3, 3)), ((1, 8), (1, 8))])
def test_actors_are_a_number_or_two(fake_ray, bounds, found):
    assert check_actors("replicas", bounds, 1, 0) == found


@pytest.mark.parametrize(
    ("bounds", "num_gpus", "says"),
    [
        *((bounds, 0, "replicas: expected at least 1") for bounds in (0, -1, (2, 1), (0, 4))),
        *((1, num_gpus, "num_gpus: expected a whole number") for num_gpus in (0.5, -1, 1.5)),
    ],
)
def test_actors_that_make_no_sense_are_refused(bounds, num_gpus, says):
    with pytest.raises(InvalidParameterError, match=f"^{says}"):
        check_actors("replicas", bounds, 1, num_gpus)


def test_actors_share_the_caches_of_the_process_that_starts_them(monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", "/shared/cache")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    variables = actor_environment()["env_vars"]
    assert variables["VERAX_CACHE_DIR"] == "/shared/cache"
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


def test_a_cluster_is_connected_to(fake_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    start_ray(num_cpus=3)
    assert fake_ray.started == [{"log_to_driver": False}]


def test_a_ray_that_does_not_start_is_one_error(fake_ray):
    def fail(**options):
        raise Exception("the node timed out")

    fake_ray.init = fail
    with pytest.raises(VeraxError, match=r"^ray: it did not start on this machine.*timed out"):
        start_ray()


def test_one_compiles_and_the_others_wait_until_it_has(monkeypatch, tmp_path):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    begun, compiled, entered = threading.Event(), threading.Event(), []

    def first():
        with cluster.one_compiles("model", {"max_num_seqs": 8}):
            begun.set()
            assert compiled.wait(20)

    def second():
        with cluster.one_compiles("model", {"max_num_seqs": 8}):
            entered.append(compiled.is_set())

    compiling = threading.Thread(target=first)
    compiling.start()
    assert begun.wait(20)
    waiting = threading.Thread(target=second)
    waiting.start()
    with cluster.one_compiles("another model"):  # another one does not wait
        pass
    compiled.set()
    compiling.join()
    waiting.join()
    assert entered == [True]


def test_a_start_that_fails_leaves_the_next_one_to_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no such model"), cluster.one_compiles("model"):
        raise ValueError("no such model")
    assert not list((tmp_path / "ray").glob("*.warm"))
    with cluster.one_compiles("model"):
        pass


def test_the_deployment_passes_its_options_to_the_engine_and_its_bounds_to_ray_serve():
    pytest.importorskip("ray", reason="needs the extra `ray`")
    pytest.importorskip("ray.serve", reason="needs the extra `ray`: make test-ray installs it")
    from verax.ray.app import build

    application = build({"model": "org/model", "replicas": [1, 8], "num_cpus": 2, "max_num_seqs": 4, "num_gpus": 1})
    ingress = application._bound_deployment
    (replicas, model, *_) = ingress.init_args
    assert model == "org/model"
    deployed = replicas._bound_deployment
    (new_server,) = deployed.init_args
    assert new_server.args[0] == "org/model"
    assert new_server.keywords["max_num_seqs"] == 4
    scaling = deployed._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 8)
    assert deployed.ray_actor_options["num_cpus"] == 2
    assert deployed.ray_actor_options["num_gpus"] == 1
