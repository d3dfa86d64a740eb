"""`/health`: 200 while requests are taken."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.errors import ApiError
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.routing import api_route
from verax.serve.http.server import Server
from verax.serve.text.answers import Health

__all__ = ["routes"]


def routes(server: Server) -> list[Route]:
    """Route of the health."""

    async def health(request: Request) -> Response:
        if server.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        if server.llm is not None and not server.llm.is_running:
            raise ApiError(503, "an engine has stopped", code="engine_dead")
        return JsonResponse({"status": "ok"})

    return [api_route("/health", health, ("GET",), answer=Health, summary="200 while requests are taken.")]
