"""Losses, training loop, and recipes of the built-in models. Needs the extra `verax[train]`."""
