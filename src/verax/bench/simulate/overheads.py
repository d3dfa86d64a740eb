"""Overheads of serving: time of the host that the device's work does not hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verax.errors import InvalidParameterError

__all__ = ["Overheads"]


@dataclass(frozen=True)
class Overheads:
    """Seconds of the host beside the device's work. The default is none of it.

    Attributes:
        per_step: of a step, for which the device waits.
        per_token: of a token that is sent to a client: detokenisation, JSON, the stream.
        per_request: of a request before it reaches the scheduler: HTTP and tokenisation.
        contention: share of the device that the host takes while it works: 0 for a device of its own, and of `N` cores
            that are both host and device one of `N`.

    Raises:
        InvalidParameterError: for negative or infinite seconds.
    """

    per_step: float = 0.0
    per_token: float = 0.0
    per_request: float = 0.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_step", "per_token", "per_request"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidParameterError(
                    f"overhead_{name}: expected a number of seconds from 0, got {getattr(self, name)}"
                )

    def scaled(self, factor: float) -> Overheads:
        """The same on a host that takes so many times as long for everything."""
        return replace(
            self,
            per_step=factor * self.per_step,
            per_token=factor * self.per_token,
            per_request=factor * self.per_request,
        )
