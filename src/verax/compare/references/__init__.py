"""PyTorch references that no library publishes."""
