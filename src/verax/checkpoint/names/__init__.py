"""Tables between the two published parameter namings of a model: the original and diffusers or transformers."""
