"""Data and recipe of the built-in encoder."""
