"""Prompts of several kinds, and a page of text that is longer than Gemma's window."""

import os
from pathlib import Path

ALL_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\nprint(",
    "Water boils at a temperature of",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet of the solar system?\nA:",
    "Ingredients:\n- 200 g of flour\n- 2 eggs\n",
    "Le petit prince habitait une planète",
    "Es war einmal ein König, der",
    "El perro corre por el parque y",
    "日本の首都は",
    "Москва — столица",
    '{"name": "Mia", "age": 31, "city": "',
    "| Country | Capital |\n|---|---|\n| Norway | Oslo |\n|",
    "<html>\n<head>\n  <title>",
    "1, 1, 2, 3, 5, 8, 13,",
    "  two spaces,   three, and\n\n\nempty lines 🦊 \t",
    "The bank of the river was steep, so",
]

PROMPTS = ALL_PROMPTS if os.environ.get("VERAX_TEST_PROMPTS") == "all" else ALL_PROMPTS[1::5]
"""Four of them, or all twenty by `make test-real PROMPTS=all`."""

PAGE = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8")
