"""Simulation of replicas that serve requests: the engine's own scheduler and cache, on a clock instead of a device."""
