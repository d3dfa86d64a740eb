"""Embeddings: which of some sentences means the same as another.

Run it with `python examples/embed.py`, or `python examples/embed.py sentence-transformers/all-MiniLM-L6-v2`.
"""

import sys

from verax import Encoder

QUESTION = "Mia bought three apples for $5."
SENTENCES = [
    "Mia bought three lemons for $5.",
    "Mia spent five dollars on 3 apples.",
    "It will rain in Oslo on Sunday.",
]

encoder = Encoder(sys.argv[1] if len(sys.argv) > 1 else None)  # the built-in one where nothing else is named
scores = encoder.encode(SENTENCES) @ encoder.encode(QUESTION)
print(QUESTION)
for score, sentence in sorted(zip(scores.tolist(), SENTENCES, strict=True), reverse=True):
    print(f"  {score:.3f}  {sentence}")
