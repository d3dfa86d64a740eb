"""`verax bench`: measurements that anyone can repeat."""

from verax.cli.bench.commands import app

__all__ = ["app"]
