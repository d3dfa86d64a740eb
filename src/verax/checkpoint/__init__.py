"""Files to arrays and back: Hugging Face folders and hub ids, memory-mapped, placed straight onto devices."""

from verax.checkpoint.checkpoint import Checkpoint, fingerprint
from verax.checkpoint.load import load_module
from verax.checkpoint.resolve import resolve
from verax.checkpoint.save import save

__all__ = ["Checkpoint", "fingerprint", "load_module", "resolve", "save"]
