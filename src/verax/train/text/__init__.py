"""The built-in language model: its data and its recipe."""
