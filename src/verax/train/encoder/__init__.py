"""The built-in encoder: its data and its recipe."""
