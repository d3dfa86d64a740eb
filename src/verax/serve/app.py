"""The application: the routes of every module, the middleware, and the routes of the server itself."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.errors import EXCEPTION_HANDLERS, ApiError, JsonResponse, model_error
from verax.serve.http.metrics import TextMetrics
from verax.serve.http.middleware import BodyLimit, RequestLog, Security
from verax.serve.http.openapi import ApiRoute, api_routes, describe
from verax.serve.http.server import Server
from verax.serve.page import page
from verax.serve.text import chat, completions, embeddings, messages, responses, tokens
from verax.serve.video import videos

LONGEST_STEP = 600.0
"""Seconds after which a step is taken for one that will not end, as of a device that does not answer."""


def _own_routes(server: Server) -> list[Route]:
    """Routes of the server itself: its health, metrics, description and models."""
    created = int(time.time())
    registry = CollectorRegistry()
    if server.llm is not None:
        TextMetrics(server.llm, server.served_names[0], registry)

    async def health(request: Request) -> Response:
        if server.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        if server.llm is not None and not server.llm.is_running:
            raise ApiError(503, "an engine has stopped", code="engine_dead")
        if server.llm is not None and (seconds := server.llm.stats().step_seconds) > LONGEST_STEP:
            raise ApiError(503, f"a step of an engine has run for {seconds:.0f} s", code="engine_stuck")
        return JsonResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(request: Request) -> Response:
        return JsonResponse(describe(request.app.routes))

    async def list_models(request: Request) -> Response:
        return JsonResponse({"object": "list", "data": _models(server, created)})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        for key in ("id", "root"):
            for model in _models(server, created):
                if model[key] == name:
                    return JsonResponse(model)
        raise model_error(f"{name[:200]!r} is not served here")

    return [
        *api_routes("/models", list_models, ("GET",), summary="List the models."),
        *api_routes("/models/{name:path}", get_model, ("GET",), summary="Describe a model."),
        ApiRoute("/health", health, ("GET",), summary="200 while requests are taken."),
        ApiRoute("/metrics", metrics, ("GET",), media=("text/plain",), summary="Metrics for Prometheus."),
        Route("/openapi.json", openapi),
    ]


def _models(server: Server, created: int) -> list[dict[str, Any]]:
    models: list[tuple[str, str, int | None, str | None]] = []
    if server.llm is not None:
        root = server.root or server.served_names[0]
        base, length = server.served_names[0], server.llm.max_model_len
        models += [(name, root, length, None) for name in server.served_names]
        models += [(name, str(adapter.lora_path), length, base) for name, adapter in server.adapters.items()]
    others = (server.encoder, server.reranker, server.videos)
    models += [(model.name, model.root, None, None) for model in others if model is not None]
    names = ("id", "root", "max_model_len", "parent")
    head = {"object": "model", "created": created, "owned_by": "verax"}
    return [{**head, **dict(zip(names, values, strict=True))} for values in models]


ROUTES = (
    chat.routes,
    completions.routes,
    responses.routes,
    messages.routes,
    tokens.routes,
    embeddings.routes,
    videos.routes,
    _own_routes,
)
"""Functions that give the routes of a server, in the order in which these are tried."""


def create_app(server: Server) -> Starlette:
    """The ASGI application of a server."""
    layers: list[Middleware] = []
    if server.settings.allowed_origins:  # around all others, so that a page can read each of their errors
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(server.settings.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                allow_private_network=True,  # Chrome asks where a page of the internet calls a server on this network
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    layers += [Middleware(layer, server) for layer in (RequestLog, Security, BodyLimit)]
    functions = ROUTES if server.settings.disable_page else (*ROUTES, page.routes)
    app = Starlette(
        routes=[route for routes in functions for route in routes(server)],
        middleware=layers,
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False
    return app
