"""The application: routes of every module, errors, and the layers around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from verax.serve.http import health, metrics, openapi
from verax.serve.http.errors import EXCEPTION_HANDLERS
from verax.serve.http.middleware import BodyLimit, RequestLog
from verax.serve.http.security import Security
from verax.serve.http.server import Server
from verax.serve.page import page
from verax.serve.text import chat, completions, embeddings, messages, models, rerank, responses, tokens
from verax.serve.video import videos

__all__ = ["create_app"]

ROUTE_MODULES = (
    chat,
    completions,
    responses,
    messages,
    tokens,
    models,
    embeddings,
    rerank,
    videos,
    health,
    metrics,
    openapi,
)
"""Modules with a function `routes(server)`, in the order in which their routes are tried."""


def create_app(server: Server) -> Starlette:
    """The ASGI application of a server."""
    layers = [Middleware(RequestLog, server)]
    if server.settings.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(server.settings.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    layers += [Middleware(Security, server), Middleware(BodyLimit, server)]
    modules = ROUTE_MODULES if server.settings.disable_page else (*ROUTE_MODULES, page)
    app = Starlette(
        routes=[route for module in modules for route in module.routes(server)],
        middleware=layers,
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=server.lifespan,
    )
    app.router.redirect_slashes = False
    return app
