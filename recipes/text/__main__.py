"""`python -m recipes.text`: train the built-in language model, in under an hour on two CPU cores."""

from recipes import parse
from recipes.text.recipe import train_builtin

print(f"trained: {train_builtin(**parse(__doc__, 'runs/text'))}")
