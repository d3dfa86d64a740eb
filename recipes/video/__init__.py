"""Data and recipe of the built-in video model."""
