"""The delta rules beside PyTorch: `verax bench delta`."""
