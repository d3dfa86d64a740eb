"""`python -m recipes.encoder`: train the built-in encoder of sentences, in some minutes on two CPU cores."""

from recipes import parse, print_measurements
from recipes.encoder.evaluation import evaluate
from recipes.encoder.recipe import train_builtin

options = parse(__doc__, "runs/encoder")
folder = train_builtin(options.output, steps=options.steps, seed=options.seed, resume=options.resume)
print_measurements(evaluate(folder))
print(f"trained: {folder}")
