"""verax: generative models in JAX, from the checkpoints that PyTorch users publish, proven to give the same results."""

__version__ = "0.1.0"
