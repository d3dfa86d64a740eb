"""Data and recipe of the built-in language model."""
