"""The built-in video model: its data and its recipe."""
