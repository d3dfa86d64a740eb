"""The delta rules compared with PyTorch: `verax bench delta`."""
