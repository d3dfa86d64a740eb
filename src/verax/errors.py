"""Hierarchy of the errors that verax raises on purpose, so that callers can tell them from bugs."""

__all__ = [
    "CheckpointError",
    "ContextLengthError",
    "EngineDeadError",
    "HostsError",
    "InvalidParameterError",
    "MissingDependencyError",
    "QueueFullError",
    "RequestRefusedError",
    "StructuredOutputError",
    "TemplateError",
    "UnsupportedModelError",
    "VeraxError",
]


class VeraxError(Exception):
    """Base class. The message says what was given, what was expected and what to try."""


class CheckpointError(VeraxError):
    """Unreadable checkpoint: a file is missing, truncated or corrupt, or a weight does not fit the model."""


class UnsupportedModelError(VeraxError):
    """Valid checkpoint of an architecture or option that verax does not implement."""


class InvalidParameterError(VeraxError, ValueError):
    """Argument that is out of range or contradicts another. The message begins with the argument's name."""


class RequestRefusedError(VeraxError, ValueError):
    """Request that this engine can never serve, such as a prompt that is too long. Other requests are not affected."""


class ContextLengthError(RequestRefusedError):
    """Prompt that leaves no room for an answer.

    Args:
        message: the text for people.
        num_tokens: number of the prompt's tokens.
        max_model_len: longest sequence that the engine serves, in tokens.
    """

    def __init__(self, message: str, num_tokens: int, max_model_len: int):
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        # Exceptions are pickled with their message only.
        return type(self), (str(self), self.num_tokens, self.max_model_len)


class QueueFullError(RequestRefusedError):
    """Request that does not fit into the bounded queue now. It can be tried again later."""


class EngineDeadError(VeraxError):
    """Engine that was shut down or has failed. The cause, if any, is the error that it failed with."""


class HostsError(VeraxError):
    """Group of hosts that cannot be formed, whose members differ, or that has lost one."""


class StructuredOutputError(VeraxError):
    """Grammar that took too much work while an answer was generated. Other requests are not affected."""


class TemplateError(VeraxError):
    """Missing chat template, or a failure to render it."""


class MissingDependencyError(VeraxError, ImportError):
    """Missing optional dependency. The message names the extra that installs it."""
