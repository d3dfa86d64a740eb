"""Runtime checking of every shape annotation in verax, on for tests only."""

from jaxtyping import install_import_hook

install_import_hook("verax", "beartype.beartype")
