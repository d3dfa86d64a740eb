"""`BatchQueue`: batches of whatever waits, bounds, cancellation and the end."""

import asyncio
import threading

import numpy as np
import pytest

from verax.errors import EngineDeadError, QueueFullError
from verax.serve.text.embeddings import BatchQueue


class SlowEncoder:
    """Stands in for an encoder: a vector is the sentence's tokens, and a batch waits for permission."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Semaphore(0)
        self.started = threading.Semaphore(0)

    def encode_tokens(self, token_ids):
        self.batches.append([ids[0] for ids in token_ids])
        self.started.release()
        assert self.may_go.acquire(timeout=10)
        if any(ids[0] < 0 for ids in token_ids):
            raise ValueError("negative")
        return np.asarray([[ids[0], len(ids)] for ids in token_ids], np.float32)


@pytest.fixture
def encoder():
    return SlowEncoder()


@pytest.fixture
def queue(encoder):
    queue = BatchQueue(encoder.encode_tokens, name="test", batch_size=4, max_inputs=8)
    yield queue
    for _ in range(8):
        encoder.may_go.release()
    queue.close()


def embed(queue, token_ids):
    return queue.run(token_ids, [len(ids) for ids in token_ids])


async def started(encoder):
    assert await asyncio.to_thread(encoder.started.acquire, timeout=10)


def test_what_waits_when_the_thread_becomes_free_is_one_batch(queue, encoder):
    async def main():
        first = asyncio.create_task(embed(queue, [[1]]))
        await started(encoder)
        rest = [asyncio.create_task(embed(queue, [[10 * i, 0], [10 * i + 1]])) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        for _ in range(3):
            encoder.may_go.release()
        return await asyncio.gather(first, *rest)

    results = asyncio.run(main())
    assert encoder.batches == [[1], [10, 11, 20, 21], [30, 31]]
    assert [result.tolist() for result in results] == [
        [[1, 1]],
        *([[10 * i, 2], [10 * i + 1, 1]] for i in (1, 2, 3)),
    ]


def test_a_request_that_was_cancelled_is_left_out(queue, encoder):
    async def main():
        first = asyncio.create_task(embed(queue, [[1]]))
        await started(encoder)
        gone, rest = asyncio.create_task(embed(queue, [[2]])), asyncio.create_task(embed(queue, [[3]]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        encoder.may_go.release(2)
        await asyncio.gather(first, rest)

    asyncio.run(main())
    assert encoder.batches == [[1], [3]]


def test_an_error_reaches_its_batch_and_the_queue_goes_on(queue, encoder):
    encoder.may_go.release(2)

    async def main():
        with pytest.raises(ValueError, match="negative"):
            await embed(queue, [[-1]])
        return await embed(queue, [[5]])

    assert asyncio.run(main()).tolist() == [[5, 1]]


def test_places_are_bounded_and_given_back(queue):
    with queue.slots(5):
        with pytest.raises(QueueFullError, match="5 inputs wait or run, and 8 may"), queue.slots(4):
            pass
        with queue.slots(3):
            pass
    with queue.slots(8):
        pass


def test_closing_fails_those_who_wait(encoder):
    queue = BatchQueue(encoder.encode_tokens, name="test", batch_size=1, max_inputs=8)

    async def main():
        tasks = [asyncio.create_task(embed(queue, [[i]])) for i in (1, 2)]
        await started(encoder)
        closing = asyncio.create_task(asyncio.to_thread(queue.close))
        while not queue._closed:
            await asyncio.sleep(0.001)
        encoder.may_go.release()
        await closing
        assert (await tasks[0]).tolist() == [[1, 1]]
        with pytest.raises(EngineDeadError):
            await tasks[1]
        with pytest.raises(EngineDeadError):
            await embed(queue, [[3]])

    asyncio.run(main())


def test_a_wrong_number_of_results_fails_its_request_and_not_the_thread():
    queue = BatchQueue(lambda inputs: np.ones((len(inputs) - (inputs[0] < 0), 1)), name="t", batch_size=4, max_inputs=8)

    async def main():
        with pytest.raises(RuntimeError, match="1 results for 2 inputs"):
            await queue.run([-1, -2], [2, 1])
        return await queue.run([1, 2], [1, 1])

    assert asyncio.run(main()).shape == (2, 1)
    queue.close()
