"""Speculative decoding: drafts of the next tokens, which the model verifies several at a time."""
