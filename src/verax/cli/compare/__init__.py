"""`verax compare`: proof that verax computes what PyTorch computes."""

from verax.cli.compare.commands import app

__all__ = ["app"]
