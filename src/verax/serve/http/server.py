"""`Server`: the engines that are served, and the state of the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from verax.errors import InvalidParameterError
from verax.serve.http.errors import model_error
from verax.serve.http.settings import ServerSettings
from verax.serve.http.sse import EventStream, RunningStreams

if TYPE_CHECKING:
    from verax.embed.encoder import Encoder
    from verax.embed.reranker import Reranker
    from verax.serve.http.telemetry import RequestTracer
    from verax.text.engine.async_llm import AsyncLLM
    from verax.text.features.chat_format import ChatFormat
    from verax.text.features.lora import LoRARequest
    from verax.video.pipeline import VideoPipeline

T = TypeVar("T")


class LazyModel(Generic[T]):
    """A model that is loaded in a thread when it is first needed.

    `root`: the checkpoint, as `/v1/models` shows it; the name if None.
    """

    def __init__(self, name: str, load: Callable[[], T], *, root: str | None = None):
        self.name = name
        self.root = root or name
        self._load = load
        self._task: asyncio.Future[T] | None = None

    @property
    def loaded(self) -> T | None:
        """The model, or None while it is not loaded."""
        task = self._task
        return task.result() if task is not None and task.done() and not task.exception() else None

    async def get(self) -> T:
        """The model. It is loaded once, for all who wait; a failure is raised, and the next call tries again."""
        if self._task is None:
            self._task = asyncio.get_running_loop().run_in_executor(None, self._load)
            self._task.add_done_callback(self._forget_failure)
        return await asyncio.shield(self._task)

    def _forget_failure(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._task = None


@dataclass
class Server:
    """Engines, names and settings: everything that a handler of a request needs.

    Attributes:
        served_names: names of the text model in requests; answers have the first.
        video_loras: names of the LoRA files of the video model, with their factors.
        root: the text checkpoint, as `/v1/models` shows it; the first name if None.
        draining: True once the server is to end: new requests get 503.
    """

    llm: AsyncLLM | None = None
    served_names: tuple[str, ...] = ("verax-text",)
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    encoder: LazyModel[Encoder] | None = None
    reranker: LazyModel[Reranker] | None = None
    videos: LazyModel[VideoPipeline] | None = None
    video_loras: tuple[str, ...] = ()
    settings: ServerSettings = field(default_factory=ServerSettings)
    root: str | None = None
    draining: bool = False
    num_requests: int = 0
    streams: RunningStreams = field(default_factory=RunningStreams)
    tracer: RequestTracer | None = None
    contexts: list[Callable[[], AbstractAsyncContextManager[Any]]] = field(default_factory=list)
    """Context managers that are open while the server runs. Route modules add theirs: workers, folders."""

    def __post_init__(self) -> None:
        if self.tracer is not None:
            self.contexts.append(self.tracer.running)
        if self.llm is not None and not self.served_names:
            raise InvalidParameterError("served_names: at least one name is needed")
        if taken := sorted(set(self.served_names) & set(self.adapters)):
            raise InvalidParameterError(f"lora_modules: {', '.join(taken)} is the model's own name")

    def text_model(self, name: str | None) -> str:
        """Name of the text model for an answer, if a request's model is that one or an adapter of it."""
        if self.llm is None:
            raise model_error("no text model is served here")
        return self.check_model(name, self.text_names, self.root)

    @property
    def text_names(self) -> tuple[str, ...]:
        """Names of the text model, and of its adapters."""
        return (*self.served_names, *self.adapters)

    def check_model(self, name: str | None, served: tuple[str, ...], root: str | None) -> str:
        """Name of a model in an answer: the request's own, or the first of the served ones if it has none.

        A request may also name `root`, the path or hub id of the checkpoint.
        """
        if not name or (name == root and name not in served):
            return served[0]
        if name in served or self.settings.any_model_name:
            return name
        problem = f"{name[:200]!r} is not served here, but {', '.join(served)}; --any-model-name accepts every name"
        raise model_error(problem)

    @property
    def engine(self) -> AsyncLLM:
        """The text engine, of a server that has one."""
        assert self.llm is not None
        return self.llm

    def stream(self, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Answer of encoded events, with the server's times."""
        times = {name: getattr(self.settings, name) for name in ("ping_interval", "slow_client_timeout")}
        return EventStream(events, **times)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Syntax of the text model's answers: tool calls and reasoning."""
        from verax.text.features.chat_format import ChatFormat, chat_format

        return ChatFormat() if self.engine.tokenizer is None else chat_format(self.engine.tokenizer)

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Context of the running application: the modules' contexts, and the end of the engine."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_engine)
            for context in self.contexts:
                await stack.enter_async_context(context())
            stack.push_async_callback(self.streams.close)
            yield

    async def _stop_engine(self) -> None:
        if self.llm is not None and self.llm.is_running:
            await self.llm.shutdown()
