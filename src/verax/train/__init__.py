"""Losses, training loop and fine-tuning. Needs the extra `verax[train]`."""
