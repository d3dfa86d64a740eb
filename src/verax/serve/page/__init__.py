"""The page, and the files that it consists of."""
