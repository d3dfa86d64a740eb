"""`python -m recipes.encoder`: train the built-in encoder of sentences, in some minutes on two CPU cores."""

from recipes import parse, print_measurements
from recipes.encoder.evaluation import evaluate
from recipes.encoder.recipe import train_builtin

folder = train_builtin(**parse(__doc__, "runs/encoder"))
print_measurements(evaluate(folder))
print(f"trained: {folder}")
