"""`python -m recipes.text`: train the built-in language model, in under an hour on two CPU cores."""

from recipes import parse
from recipes.text.recipe import train_builtin

options = parse(__doc__, "runs/text")
print(f"trained: {train_builtin(options.output, steps=options.steps, seed=options.seed, resume=options.resume)}")
