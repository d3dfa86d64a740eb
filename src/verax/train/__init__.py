"""Losses, training loop, fine-tuning, and recipes of the built-in models. Needs the extra `verax[train]`."""
