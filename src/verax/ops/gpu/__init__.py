"""Fast implementations for GPUs: what JAX and the vendors' libraries have, registered with the operations."""
