"""`deployment`: an application of Ray Serve, replicas of a text model with OpenAI's HTTP in front of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from verax._optional import require_optional
from verax.ray.cluster import actor_environment
from verax.ray.replica import MOST_ONGOING, TARGET, bind_replicas
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings


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
    **options: Any,
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
    handle = bind_replicas(
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


def _new_server(model: str | None, names: tuple[str, ...], **options: Any) -> Server:
    from verax.text.engine.async_llm import AsyncLLM

    return Server(llm=AsyncLLM(model, use_tqdm=False, **options), served_names=names)


def build(arguments: dict[str, Any]) -> Any:
    """The application of `verax.ray.deployment`, with the arguments that a configuration of Ray Serve has in `args`."""
    return deployment(**arguments)
