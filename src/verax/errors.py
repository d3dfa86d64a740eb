"""The errors that verax raises on purpose: one hierarchy, so that callers can tell them from bugs."""

__all__ = [
    "CheckpointError",
    "InvalidParameterError",
    "MissingDependencyError",
    "RequestRefusedError",
    "TemplateError",
    "UnsupportedModelError",
    "VeraxError",
]


class VeraxError(Exception):
    """Base of every deliberate error. The message says what was given, what was expected and what to try."""


class CheckpointError(VeraxError):
    """A checkpoint cannot be read: a file is missing, truncated or corrupt, or a weight does not fit the model."""


class UnsupportedModelError(VeraxError):
    """The checkpoint is sound, but describes an architecture or option that verax does not implement."""


class InvalidParameterError(VeraxError, ValueError):
    """An argument is out of range or contradicts another. The message begins with the argument's name."""


class RequestRefusedError(VeraxError, ValueError):
    """A request can never be served by this engine (a prompt too long, say). Other requests are not affected."""


class TemplateError(VeraxError):
    """The checkpoint has no chat template, or rendering it failed."""


class MissingDependencyError(VeraxError, ImportError):
    """An optional dependency is needed. The message names the extra that installs it."""
