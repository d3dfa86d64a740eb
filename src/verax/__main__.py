"""`python -m verax`."""

from verax.cli import main

main()
