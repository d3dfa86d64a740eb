"""Schemas of the custom kinds in deploy/, after their projects' types: KEDA v1alpha1, LeaderWorkerSet v1, KubeRay v1.

They have the fields of each object, which of them are required, and the values of fields with a choice. Objects of
Kubernetes itself, such as pod templates, are checked by its own schemas.
"""

TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
OTHER = {"type": "object"}
"""An object that the manifests do not have, or one of Kubernetes itself."""


def record(required, **optional):
    """Schema of an object that has these fields and no others."""
    fields = {**required, **optional}
    return {"type": "object", "required": [*required], "properties": fields, "additionalProperties": False}


def kind(version, spec):
    """Schema of a document."""
    return record({"apiVersion": {"const": version}, "kind": TEXT, "metadata": OTHER, "spec": spec})


def choice(*values):
    return {"enum": [*values]}


TRIGGER = record(
    {"type": TEXT, "metadata": TEXTS},
    name=TEXT,
    useCachedMetrics=FLAG,
    authenticationRef=record({"name": TEXT}, kind=TEXT),
    metricType=choice("AverageValue", "Value", "Utilization"),
)
SCALED_OBJECT = record(
    {
        "scaleTargetRef": record({"name": TEXT}, apiVersion=TEXT, kind=TEXT, envSourceContainerName=TEXT),
        "triggers": {"type": "array", "items": TRIGGER, "minItems": 1},
    },
    pollingInterval=COUNT,
    initialCooldownPeriod=COUNT,
    cooldownPeriod=COUNT,
    idleReplicaCount=COUNT,
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    advanced=OTHER,
    fallback=record(
        {"failureThreshold": COUNT, "replicas": COUNT},
        behavior=choice("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
    ),
)

LEADER_WORKER_SET = record(
    {
        "leaderWorkerTemplate": record(
            {"workerTemplate": OTHER},
            leaderTemplate=OTHER,
            size={"type": "integer", "minimum": 1},
            restartPolicy=choice("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            subGroupPolicy=OTHER,
            volumeClaimTemplates={"type": "array"},
            persistentVolumeClaimRetentionPolicy=OTHER,
        )
    },
    replicas=COUNT,
    rolloutStrategy=OTHER,
    startupPolicy=choice("LeaderCreated", "LeaderReady"),
    networkConfig=OTHER,
)

HEAD = record(
    {"rayStartParams": TEXTS, "template": OTHER},
    serviceType=choice("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    headService=OTHER,
    enableIngress=FLAG,
)
WORKERS = record(
    {"groupName": TEXT, "minReplicas": COUNT, "maxReplicas": COUNT, "rayStartParams": TEXTS, "template": OTHER},
    replicas=COUNT,
    numOfHosts=COUNT,
    scaleStrategy=OTHER,
)
RAY_SERVICE = record(
    {
        "serveConfigV2": TEXT,
        "rayClusterConfig": record(
            {"headGroupSpec": HEAD, "workerGroupSpecs": {"type": "array", "items": WORKERS}},
            rayVersion=TEXT,
            enableInTreeAutoscaling=FLAG,
            autoscalerOptions=OTHER,
            headServiceAnnotations=TEXTS,
            suspend=FLAG,
        ),
    },
    serveService=OTHER,
)

SCHEMAS = {
    "ScaledObject": kind("keda.sh/v1alpha1", SCALED_OBJECT),
    "LeaderWorkerSet": kind("leaderworkerset.x-k8s.io/v1", LEADER_WORKER_SET),
    "RayService": kind("ray.io/v1", RAY_SERVICE),
}
