"""Runtime checking of shape annotations, on for tests only, where arrays are.

Elsewhere public functions are to refuse wrong types with their own errors, and a checker in front would hide them.
"""

from jaxtyping import install_import_hook

ARRAYS = ("ops", "nn", "models", "text.step", "text.slots", "text.runner", "train.loss", "train.precision")

install_import_hook([f"verax.{name}" for name in ARRAYS], "beartype.beartype")
