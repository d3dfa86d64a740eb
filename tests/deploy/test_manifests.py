"""The manifests in deploy/: valid for Kubernetes, and made of options that verax has."""

import inspect
import math
from pathlib import Path

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs it: pip install 'verax[test-all]'")

from verax.cli.serve import serve
from verax.options import options_of
from verax.ray.app import deployment
from verax.text.engine.engine_config import EngineConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


SCALED = {
    "scaleTargetRef",
    "triggers",
    "pollingInterval",
    "cooldownPeriod",
    "minReplicaCount",
    "maxReplicaCount",
    "fallback",
}
CUSTOM = {
    "ScaledObject": ("keda.sh/v1alpha1", SCALED),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", {"leaderWorkerTemplate", "replicas"}),
    "RayService": ("ray.io/v1", {"serveConfigV2", "rayClusterConfig"}),
}
"""Kinds of which Kubernetes has no schemas: their version, and the fields of a spec that the manifests may use."""


DOCUMENTS = {
    f"{path.stem}-{document['kind']}-{number}": document
    for path in sorted(FOLDER.glob("*.yaml"))
    for number, document in enumerate(yaml.safe_load_all(path.read_text()))
}


def pod_templates(value):
    """Every pod template of a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from pod_templates(item)


def load(name, kind):
    (found,) = [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document["kind"] == kind]
    return found


def check(document):
    if document["kind"] in CUSTOM:
        version, fields = CUSTOM[document["kind"]]
        assert (document["apiVersion"], document["spec"].keys() - fields) == (version, set())
        return
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_manifest_is_valid(document):
    check(document)
    for template in pod_templates(document):
        check({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "pod"}})


PODS = [
    pytest.param(template["spec"], id=name)
    for name, document in DOCUMENTS.items()
    for template in pod_templates(document)
]
every_pod = pytest.mark.parametrize("pod", PODS)


@every_pod
def test_a_pod_outlives_its_drain(pod):
    for container in pod["containers"]:
        arguments = container.get("args", [])
        if "--shutdown-timeout" in arguments:
            drain = float(arguments[arguments.index("--shutdown-timeout") + 1])
            pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert pod["terminationGracePeriodSeconds"] > drain + pause


@every_pod
def test_every_container_has_limits_and_the_commands_options_exist(pod):
    options = set(inspect.signature(serve).parameters)
    for container in pod["containers"]:
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        given = {argument for argument in container.get("args", []) if argument.startswith("--")}
        assert {option.removeprefix("--").replace("-", "_") for option in given} <= options


def test_the_autoscalers_scale_the_deployment_by_the_servers_own_metric():
    name = load("deployment.yaml", "Deployment")["metadata"]["name"]
    autoscaler = load("autoscaler.yaml", "HorizontalPodAutoscaler")
    scaled = load("scaledobject.yaml", "ScaledObject")["spec"]
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == scaled["scaleTargetRef"]["name"] == name
    assert autoscaler["spec"]["metrics"][0]["pods"]["metric"]["name"] == "vllm_num_requests_waiting"
    assert "vllm:num_requests_waiting{" in scaled["triggers"][0]["metadata"]["query"]
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]


def test_a_group_of_hosts_is_one_command_with_its_rank_from_the_controller():
    group = load("leaderworkerset.yaml", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate"))
    for container in (leader, worker):
        options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
        assert options["--nnodes"] == "$(LWS_GROUP_SIZE)"
        assert options["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert options["--master-addr"] == "$(LWS_LEADER_ADDRESS):29500"
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group["size"]
        assert int(options["--tensor-parallel-size"]) == gpus
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "readinessProbe" in leader
    assert "readinessProbe" not in worker  # a follower serves no HTTP


def test_the_ray_service_gives_arguments_that_the_deployment_takes_and_leaves_a_cpu():
    spec = load("rayservice.yaml", "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "verax.ray.app:build"
    known = set(inspect.signature(deployment).parameters) | set(options_of(EngineConfig))
    assert set(application["args"]) <= known
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert application["args"]["num_cpus"] <= cpus - 1
    assert application["args"]["replicas"][1] <= group["maxReplicas"] * math.floor(
        cpus / application["args"]["num_cpus"]
    )
