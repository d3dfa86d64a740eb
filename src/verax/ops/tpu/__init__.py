"""Implementations for TPUs: kernels in Pallas, chosen by name until a device has run them."""
