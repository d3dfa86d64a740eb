"""`/v1/models`: the models that are served, by name."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.errors import ApiError
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.routing import api_routes
from verax.serve.http.server import Server
from verax.serve.text.answers import ModelList, ModelObject

__all__ = ["routes"]


def routes(server: Server) -> list[Route]:
    """Routes of the list of models, and of one model."""
    created = int(time.time())

    async def list_models(request: Request) -> Response:
        return JsonResponse({"object": "list", "data": _models(server, created)})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        for model in _models(server, created):
            if model["id"] == name:
                return JsonResponse(model)
        raise ApiError(404, f"model: {name[:200]!r} is not served here", param="model", code="model_not_found")

    return [
        *api_routes("/models", list_models, ("GET",), answer=ModelList, summary="List the models."),
        *api_routes("/models/{name:path}", get_model, ("GET",), answer=ModelObject, summary="Describe a model."),
    ]


def _models(server: Server, created: int) -> list[dict[str, Any]]:
    found: list[tuple[str, str, int | None, str | None]] = []
    if server.llm is not None:
        root = server.root or server.served_names[0]
        base, length = server.served_names[0], server.llm.max_model_len
        found += [(name, root, length, None) for name in server.served_names]
        found += [(name, str(adapter.lora_path), length, base) for name, adapter in server.adapters.items()]
    others = (server.encoder, server.reranker, server.videos)
    found += [(model.name, model.root, None, None) for model in others if model is not None]
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "verax",
            "root": root,
            "parent": parent,
            "max_model_len": length,
        }
        for name, root, length, parent in found
    ]
