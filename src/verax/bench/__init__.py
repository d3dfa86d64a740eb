"""Timing and memory, compared with other libraries on the same machine in the same run."""
