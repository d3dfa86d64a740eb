"""Bytes, operations and least times of a model on a device that need not be there. No weights are read."""
