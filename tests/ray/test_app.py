import pytest

from verax.errors import InvalidParameterError
from verax.ray.app import check_replicas


@pytest.mark.parametrize(("bounds", "found"), [(1, (1, 1)), (3, (3, 3)), ((1, 8), (1, 8))])
def test_replicas_are_a_number_or_two(bounds, found):
    assert check_replicas(bounds) == found


@pytest.mark.parametrize("bounds", [0, -1, (2, 1), (0, 4)])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(InvalidParameterError, match=r"^replicas: expected at least 1"):
        check_replicas(bounds)


def test_the_deployment_passes_its_options_to_the_engine_and_its_bounds_to_ray_serve(ray):
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
