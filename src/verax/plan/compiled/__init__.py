"""Compilation of a model's programs for devices that are not attached: memory, collectives, copies."""
