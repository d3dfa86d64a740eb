"""A server that speaks the API with canned answers, so that the page is tested without a model.

It serves the real page with its real routes. What a question says chooses the answer: see `ANSWERS`.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.support.pictures import saved
from verax.serve.http.errors import EXCEPTION_HANDLERS
from verax.serve.http.middleware import RequestLog, Security
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, EventStream, data_event
from verax.serve.page import page

RICH = """## Two sums

The first is **12 + 30 = 42**, the second is *7 × 6 = 42*.

| sum | result |
|:----|-------:|
| 12 + 30 | 42 |
| 7 × 6 | 42 |

```python
def add(a: int, b: int) -> int:
    return a + b  # no surprise
```
"""

HOSTILE = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

[click me](javascript:window.hacked=3) ![pixel](https://tracker.example/pixel.png)
<svg onload="window.hacked = 4"> <a href="data:text/html,<script>window.hacked=5</script>">data</a>

<iframe src="https://tracker.example/"></iframe> <style>body{display:none}</style>
"""

ANSWERS = {
    "rich": RICH,
    "hostile": HOSTILE,
    "line": "x" * 1_000_000,
    "slow": " ".join(f"word{number}" for number in range(600)),
}
"""Answers by the word that a question begins with. Any other question is answered with its number and itself."""

TOOL_CALL = {"index": 0, "id": "call_1", "type": "function"}


class Fake:
    """State of the server: what it was asked, and what it made."""

    def __init__(self, server: Server):
        self.server = server
        self.requests: list[dict] = []
        self.aborted = 0
        self.videos: dict[str, dict] = {}
        self.tokens = 0

    def app(self) -> Starlette:
        routes = [
            *page.routes(self.server),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/videos", self.videos_route, methods=["GET", "POST"]),
            Route("/v1/videos/{id}", self.delete_video, methods=["DELETE"]),
            Route("/v1/videos/{id}/content", self.video_content),
            Route("/metrics", self.metrics),
        ]
        return Starlette(
            routes=routes,
            exception_handlers=EXCEPTION_HANDLERS,
            middleware=[Middleware(layer, self.server) for layer in (RequestLog, Security)],
            lifespan=self.server.lifespan,
        )

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        events = self.events(body, len(self.requests))
        return EventStream(self.server.streams.start(request.headers.get("x-conversation-id"), events))

    async def events(self, body: dict, number: int) -> AsyncGenerator[bytes, None]:
        question = body["messages"][-1]["content"]
        kind = question.split()[0] if question else ""
        text = ANSWERS.get(kind, f"Answer {number} to: {question}")

        def chunk(delta: dict, finish: str | None = None, logprobs: dict | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return data_event({"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "choices": [choice]})

        try:
            yield chunk({"role": "assistant", "content": ""})
            if kind == "fail":
                yield chunk({"content": "It begins, "})
                yield data_event({"error": {"message": "engine: it stopped", "type": "server_error"}})
                return
            if kind == "think":
                for word in ("Let me see. ", "Six by seven ", "is 42."):
                    yield chunk({"reasoning_content": word})
            if kind == "tools" and body["messages"][-1]["role"] == "user":
                call = {**TOOL_CALL, "function": {"name": "weather", "arguments": ""}}
                yield chunk({"tool_calls": [call]})
                for part in ('{"city": ', '"Paris"}'):
                    yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
                yield chunk({}, "tool_calls")
                yield DONE
                return
            pieces = [text] if kind == "line" else [word + " " for word in text.split(" ")]
            for piece in pieces:
                await asyncio.sleep(0.02 if kind == "slow" else 0)
                self.tokens += 1
                yield chunk({"content": piece}, logprobs=_logprobs(piece) if body.get("logprobs") else None)
            yield chunk({}, "stop")
            yield data_event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(pieces)}})
            yield DONE
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise

    async def embeddings(self, request: Request) -> Response:
        """Vectors that count words: sentences that share words are near."""
        data = []
        for index, text in enumerate((await request.json())["input"]):
            vector = [0.1] * 64
            for word in text.lower().strip(".").split():
                vector[zlib.crc32(word.encode()) % 64] += 1.0
            data.append({"object": "embedding", "index": index, "embedding": vector})
        return JSONResponse({"object": "list", "data": data})

    async def videos_route(self, request: Request) -> Response:
        if request.method == "POST":
            body = await request.json()
            body.pop("image_reference", None)
            job = {"id": f"video_{len(self.videos)}", "object": "video", "status": "queued", "progress": 0, **body}
            job |= {"created_at": int(time.time()), "completed_at": None, "seconds_left": None, "error": None}
            self.videos[job["id"]] = job
            return JSONResponse(self.videos[job["id"]])
        for job in self.videos.values():
            if job["status"] not in ("completed", "failed"):
                job["progress"] = min(100, job["progress"] + 40)
                job["status"] = "completed" if job["progress"] == 100 else "in_progress"
                job["seconds_left"] = 90 if job["status"] == "in_progress" else None
                if job["prompt"].startswith("fail") and job["progress"] > 40:
                    job |= {
                        "status": "failed",
                        "error": {"code": "out_of_memory", "message": "more memory than there is"},
                    }
                job["completed_at"] = job["created_at"] + 3
        return JSONResponse({"object": "list", "data": [*reversed(self.videos.values())], "has_more": False})

    async def delete_video(self, request: Request) -> Response:
        del self.videos[request.path_params["id"]]
        return JSONResponse({"deleted": True})

    async def video_content(self, request: Request) -> Response:
        if request.query_params["variant"] == "video":
            return Response(b"a clip", media_type="video/mp4")
        return Response(saved("PNG"), media_type="image/png")

    async def metrics(self, request: Request) -> Response:
        labels = '{engine="0",model_name="verax-text"}'
        lines = [
            "# HELP vllm:num_requests_running Requests that run",
            f"vllm:num_requests_running{labels} 3.0",
            f"vllm:num_requests_waiting{labels} 1.0",
            f"vllm:kv_cache_usage_perc{labels} 0.25",
            f"vllm:generation_tokens_total{labels} {1200 + self.tokens}",
            f"vllm:prompt_tokens_total{labels} 340",
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {40 + len(self.requests)}',
            'vllm:request_success_total{engine="0",finished_reason="length"} 2',
            'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 30',
            'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 40',
            f"vllm:time_to_first_token_seconds_sum{labels} 3.2",
            f"vllm:time_to_first_token_seconds_count{labels} 40",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")


def _logprobs(piece: str) -> dict:
    top = [{"token": piece, "logprob": -0.2}, {"token": " other", "logprob": -1.9}]
    return {"content": [{"token": piece, "logprob": -0.2, "top_logprobs": top}]}
