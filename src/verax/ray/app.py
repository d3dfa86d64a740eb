"""Applications of Ray Serve: replicas of a server's models, and in front of them OpenAI's HTTP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Unpack

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.ray.cluster import actor_environment, check_cpus, check_gpus
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.text.engine.engine_config import EngineOptions

__all__ = ["build", "check_replicas", "deployment", "replicas"]

TARGET = 32.0
"""Requests of a replica that autoscaling aims at."""

MOST_ONGOING = 1024
"""Requests that a replica takes at once; its engine queues those beyond its slots."""

HEALTH_PERIOD = 2.0
HEALTH_TIMEOUT = 10.0
"""Seconds between two looks at a replica, and for its answer."""


def deployment(
    model: str | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    served_model_name: str | Sequence[str] | None = None,
    target_ongoing_requests: float = TARGET,
    max_queued_requests: int = 1024,
    num_ingresses: int = 1,
    settings: ServerSettings | None = None,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    revision: str | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """An application of Ray Serve that answers OpenAI's HTTP about a text model, to give to `serve.run`.

    Its ingress has the tokenizer and speaks HTTP; replicas have the engines. The stream of a replica that dies
    continues from another one with the tokens that it would have had.

    Args:
        model: as in `LLM`, and so are `dtype`, `quantization`, `revision` and `options`. Every node must find it.
        replicas: number of replicas, or the least and the most of them between which Ray Serve scales.
        num_cpus: CPUs of a replica, and threads of its JAX.
        num_gpus: GPUs of a replica.
        served_model_name: names of the model in requests; the checkpoint's if None.
        target_ongoing_requests: requests of a replica that scaling aims at.
        max_queued_requests: most requests of an ingress that wait; more get 429.
        num_ingresses: number of ingresses. Each needs half a CPU.
        settings: of the HTTP server. Its host and port are Ray Serve's.

    Raises:
        InvalidParameterError: for bounds that make no sense.
        MissingDependencyError: if Ray is not installed.

    Examples:
        >>> serve.run(verax.ray.deployment("Qwen/Qwen3-0.6B", replicas=(1, 8), num_gpus=1))
    """
    from verax.files import model_name
    from verax.ray.remote_llm import Ingress

    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or ())
    names = names or (model_name(model or "verax-text"),)
    new_server = functools.partial(
        _new_server, model, names, dtype=dtype, quantization=quantization, revision=revision, **options
    )
    handle = _replicas(
        new_server,
        replicas,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        target_ongoing_requests=target_ongoing_requests,
        max_queued_requests=max_queued_requests,
    )
    ingress = require_optional("ray.serve").deployment(
        Ingress,
        name="verax-http",
        num_replicas=num_ingresses,
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": 0.5, "runtime_env": actor_environment()},
    )
    return ingress.bind(handle, model, revision, names, max_queued_requests, settings)


def replicas(
    new_server: functools.partial[Server],
    bounds: int | tuple[int, int],
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    target_ongoing_requests: float = TARGET,
    max_queued_requests: int = 1024,
) -> Any:
    """An application of Ray Serve without HTTP: replicas of a server's models, called through a handle.

    Args:
        new_server: loads the models. It is pickled.
        bounds: number of replicas, or the least and the most.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each.
        target_ongoing_requests: requests of a replica that scaling aims at.
        max_queued_requests: most requests that wait at one handle for a replica.

    Raises:
        InvalidParameterError: for bounds that make no sense.
    """
    from verax.ray.replica import Replica

    least, most = check_replicas(bounds)
    check_gpus(num_gpus)
    check_cpus(least, num_cpus, name="replicas")
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": target_ongoing_requests,
            }
        }
    application = require_optional("ray.serve").deployment(
        Replica,
        name="verax-replica",
        max_ongoing_requests=MOST_ONGOING,
        max_queued_requests=max_queued_requests,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": actor_environment()},
        **scaling,
    )
    return application.bind(new_server)


_replicas = replicas  # `deployment` has an argument of this name


def check_replicas(bounds: int | tuple[int, int]) -> tuple[int, int]:
    """The least and the most replicas.

    Raises:
        InvalidParameterError: unless both are whole numbers of at least 1, the least first.
    """
    least, most = (bounds, bounds) if isinstance(bounds, int) else bounds
    if not 1 <= least <= most:
        raise InvalidParameterError(f"replicas: expected at least 1, and the least before the most, got {bounds!r}")
    return least, most


def _new_server(model: str | None, names: tuple[str, ...], **options: Any) -> Server:
    from verax.text.engine.async_llm import AsyncLLM

    return Server(llm=AsyncLLM(model, use_tqdm=False, **options), served_names=names)


def build(arguments: dict[str, Any]) -> Any:
    """The application of `verax.ray.deployment`, with the arguments of the configuration's `args`.

    Args:
        arguments: of `deployment`; a pair of `replicas` comes as a list.
    """
    given = dict(arguments)
    if isinstance(given.get("replicas"), list):
        given["replicas"] = tuple(given["replicas"])
    return deployment(**given)
