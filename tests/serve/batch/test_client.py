"""The client of an application in this process: what it sends, what it gets, and that it goes away when cancelled."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from verax.batch.requests import call


async def echo(request):
    body = await request.body()
    facts = {"method": request.method, "host": request.url.hostname, "type": request.headers.get("content-type")}
    return JSONResponse({**facts, "body": body.decode()}, 201, {"x-request-id": "r1"})


async def parts(request):
    async def events():
        yield b"one "
        yield b"two"

    return StreamingResponse(events())


def app_of(endpoint):
    return Starlette(routes=[Route("/path", endpoint, methods=["GET", "POST"])])


def test_a_body_is_sent_and_an_answer_comes_back():
    answer = asyncio.run(call(app_of(echo), "POST", "/path", b'{"a": 1}'))
    assert (answer.status, answer.headers["x-request-id"]) == (201, "r1")
    expected = b'{"method":"POST","host":"localhost","type":"application/json","body":"{\\"a\\": 1}"}'
    assert answer.body == expected


def test_parts_of_an_answer_are_joined():
    assert asyncio.run(call(app_of(parts), "GET", "/path")).body == b"one two"


def test_cancelling_ends_the_request():
    ended = []

    async def forever(request):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def main():
        task = asyncio.create_task(call(app_of(forever), "POST", "/path"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]
