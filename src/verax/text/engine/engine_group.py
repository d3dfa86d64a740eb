"""Engines of equal models, each on devices of its own, for one caller: a request goes to one of them."""

from __future__ import annotations

import itertools
from collections import abc

from verax.errors import InvalidParameterError
from verax.text.engine.engine import Engine
from verax.text.engine.outputs import RequestOutput
from verax.text.engine.routing import Router
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.sequence import Request
from verax.text.features.lora.loader import LoadedAdapter

__all__ = ["EngineGroup"]


class EngineGroup:
    """Engines behind the methods of one. Their devices work at the same time: a step is dispatched before it is read.

    Not thread-safe, as an engine.
    """

    def __init__(self, engines: abc.Sequence[Engine]):
        self.engines = tuple(engines)
        self._router = Router(engines, block_size=engines[0].prefix_block_size)
        self._names = itertools.count()

    @property
    def has_unfinished_requests(self) -> bool:
        """True if `advance` has anything to do."""
        return any(engine.has_unfinished_requests for engine in self.engines)

    def add_request(
        self,
        prompt: str | abc.Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        stream: bool = False,
        output_token_ids: abc.Sequence[abc.Sequence[int]] | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> str:
        """Queue a prompt at one of the engines, as `Engine.add_request` does.

        Raises:
            VeraxError: as there.
        """
        if request_id is None:
            request_id = next(name for i in self._names if self._engine(name := f"request-{i}") is None)
        elif self._engine(request_id) is not None:
            raise InvalidParameterError(f"request_id: {request_id!r} is in use by an unfinished request")
        tokens = self.engines[0].tokenize(prompt, add_special_tokens=add_special_tokens)
        engine = self._router.choose(tokens, None if adapter is None else adapter.id)
        engine.add_request(
            tokens, params, request_id=request_id, stream=stream, output_token_ids=output_token_ids, adapter=adapter
        )
        engine.request(request_id).prompt = prompt if isinstance(prompt, str) else None
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once; its output so far, or None if there is no such unfinished request."""
        engine = self._engine(request_id)
        return None if engine is None else engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One step of each engine with requests: an output for each request that got a token, or ended."""
        return [output for engine in self._busy() for output in engine.step()]

    def advance(self) -> list[Request]:
        """`step` without building outputs: the requests that got tokens. Finished ones stay until `pop_output`."""
        return [request for engine in self._busy() for request in engine.advance()]

    def request(self, request_id: str) -> Request:
        """An unfinished request by id."""
        engine = self._engine(request_id)
        assert engine is not None
        return engine.request(request_id)

    def pop_output(self, request: Request) -> RequestOutput:
        """Remove a finished request from its engine; its output."""
        engine = self._engine(request.request_id)
        assert engine is not None
        return engine.pop_output(request)

    def _busy(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.has_unfinished_requests]

    def _engine(self, request_id: str) -> Engine | None:
        return next((engine for engine in self.engines if request_id in engine), None)
