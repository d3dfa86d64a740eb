"""`Ingress`: the HTTP server as an actor of Ray Serve, in front of the replicas."""

from __future__ import annotations

from dataclasses import replace

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from verax.ray.actor import keep_off_the_network
from verax.ray.remote_llm import RemoteLLM
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings

__all__ = ["Ingress"]

ANY_ADDRESS = "0.0.0.0"
"""Host of a server that is called by names that it does not know itself."""


@serve.ingress()
class Ingress:
    """HTTP server of replicas. Ray Serve's proxy has the socket.

    Args:
        handle: of the replicas.
        model: the replicas' checkpoint; the built-in one if None.
        revision: branch, tag or commit of a hub id.
        names: names of the model in requests.
        max_queued_requests: most requests that wait for a replica.
        settings: of the server; the defaults, less the page, if None.
    """

    async def __init__(
        self,
        handle: DeploymentHandle,
        model: str | None,
        revision: str | None,
        names: tuple[str, ...],
        max_queued_requests: int,
        settings: ServerSettings | None,
    ):
        keep_off_the_network()
        description = await handle.describe.remote()
        llm = RemoteLLM(handle, description, model, revision=revision, max_queued_requests=max_queued_requests)
        settings = replace(settings or ServerSettings(disable_page=True), host=ANY_ADDRESS)
        self._server = Server(llm=llm, served_names=names, root=model, settings=settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._server)

    def check_health(self) -> None:
        """Fail if the server takes no requests. Ray Serve calls it every few seconds."""
        if not self._server.engine.is_running:
            raise RuntimeError("the server is at its end")
