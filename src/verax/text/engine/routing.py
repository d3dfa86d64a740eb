"""Choice of the replica that serves a request: the least work, counting what of its prompt each has read already."""

from __future__ import annotations

import threading
from collections import OrderedDict, abc
from typing import Generic, Protocol, TypeVar

__all__ = ["SEQUENCE_TOKENS", "RoutedReplica", "Router", "work"]

SEQUENCE_TOKENS = 128
"""Prompt tokens that an unfinished sequence counts as: about as many tokens as a usual answer has still to get."""

MOST_PREFIXES = 1 << 16
"""Blocks of prompts that a router remembers: a million tokens of text in blocks of 16, some 15 MB."""


class RoutedReplica(Protocol):
    """Replica as a router sees it."""

    @property
    def load(self) -> int:
        """Work that it has, in tokens, as `work` counts them."""
        ...


R = TypeVar("R", bound=RoutedReplica)


def work(num_waiting_tokens: int, num_seqs: int) -> int:
    """Work of an engine in tokens.

    Args:
        num_waiting_tokens: prompt tokens of sequences that wait.
        num_seqs: sequences that wait or run.
    """
    return num_waiting_tokens + SEQUENCE_TOKENS * num_seqs


class Router(Generic[R]):
    """Choice among the replicas that serve. Any thread may call it.

    A prompt goes where its last token is likely to be read first: to the replica with the least work, less the tokens
    of the prompt's beginning that this replica has read for an earlier one. So prompts that begin alike stay together,
    until their replica has more work than the others by what they would have to read anew. What a replica's cache has
    forgotten since is not known here.

    Args:
        replicas: the replicas.
        block_size: tokens of a block; a cache shares whole blocks. None to choose by work alone.
    """

    def __init__(self, replicas: abc.Iterable[R], *, block_size: int | None):
        self._block_size = block_size
        self._serving: dict[R, int] = {}
        """Each replica with its bit in `_readers`."""
        self._readers: OrderedDict[int, int] = OrderedDict()
        """By hash of a prompt's beginning, whole blocks, the least recently used first: the replicas that read it."""
        self._lock = threading.Lock()
        for replica in replicas:
            self.add(replica)

    @property
    def serving(self) -> list[R]:
        """The replicas to choose from."""
        return list(self._serving)

    def add(self, replica: R) -> None:
        """Choose among one more replica, which has read nothing."""
        taken = set(self._serving.values())
        self._serving[replica] = next(bit for i in range(len(taken) + 1) if (bit := 1 << i) not in taken)

    def remove(self, replica: R) -> None:
        """Choose a replica no more, and forget what it has read."""
        with self._lock:
            others = ~self._serving.pop(replica)
            for key in self._readers:
                self._readers[key] &= others

    def choose(self, prompt: abc.Sequence[int], adapter: int | None = None) -> R:
        """The replica of a prompt, which counts as read there from now on. Some replica must serve.

        Args:
            prompt: its token ids.
            adapter: number of its adapter; prompts of different adapters share nothing.
        """
        with self._lock:
            if len(self._serving) == 1:
                return next(iter(self._serving))
            keys = self._keys(prompt, adapter)
            cached = self._cached_tokens(keys)
            chosen = min(self._serving, key=lambda replica: replica.load - cached[replica])
            self._record(keys, self._serving[chosen])
            return chosen

    def _keys(self, prompt: abc.Sequence[int], adapter: int | None) -> list[int]:
        """Hash of the prompt's first block, of its first two, and so on. A collision only misleads the choice."""
        size = self._block_size
        if size is None:
            return []
        keys, key = [], hash(adapter)
        for end in range(size, len(prompt) + 1, size):
            key = hash((key, *prompt[end - size : end]))
            keys.append(key)
        return keys

    def _cached_tokens(self, keys: list[int]) -> dict[R, int]:
        """By replica: tokens of the prompt's beginning that it has read."""
        cached = dict.fromkeys(self._serving, 0)
        readers = sum(self._serving.values())
        for i, key in enumerate(keys, start=1):
            readers &= self._readers.get(key, 0)
            if not readers:
                break
            for replica, bit in self._serving.items():
                if readers & bit:
                    cached[replica] = i * (self._block_size or 0)
        return cached

    def _record(self, keys: list[int], bit: int) -> None:
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) | bit
        # The end of a prompt is forgotten before its beginning.
        for key in reversed(keys):
            self._readers.move_to_end(key)
        while len(self._readers) > MOST_PREFIXES:
            self._readers.popitem(last=False)
