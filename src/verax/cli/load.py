"""Options of a load of requests that is put on a server."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "LOAD",
    "TRAFFIC",
    "Burstiness",
    "Goodput",
    "InputTokens",
    "NumPrefixes",
    "OutputTokens",
    "PrefixTokens",
    "RangeRatio",
]

LOAD, TRAFFIC = "Load", "Requests"
"""Panels of the help text."""

Burstiness = Annotated[
    float, typer.Option(help="Open loop: 1 is a Poisson process, less is burstier.", rich_help_panel=LOAD)
]
Goodput = Annotated[
    str | None,
    typer.Option(
        help="Milliseconds of a good request at most, such as ttft:200,tpot:50,e2el:5000.", rich_help_panel=LOAD
    ),
]
InputTokens = Annotated[int, typer.Option(help="Tokens of a prompt.", min=1, rich_help_panel=TRAFFIC)]
OutputTokens = Annotated[int, typer.Option(help="Tokens of an answer.", min=1, rich_help_panel=TRAFFIC)]
RangeRatio = Annotated[
    float, typer.Option(help="Spread of both lengths around their mean, from 0 to 1.", rich_help_panel=TRAFFIC)
]
PrefixTokens = Annotated[
    int, typer.Option(help="Tokens of a prefix that prompts share.", min=0, rich_help_panel=TRAFFIC)
]
NumPrefixes = Annotated[int, typer.Option(help="Different prefixes.", min=1, rich_help_panel=TRAFFIC)]
