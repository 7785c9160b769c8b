"""`--config` and `--set`, which every command takes.

Knows: their spelling. Does not know: options; `config.load` checks them all, whichever a command reads.
"""

from __future__ import annotations

from typing import Annotated

import typer

ConfigFiles = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="FILE", help="YAML file with options, of other commands too."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any option: block.option=value; may be repeated."),
]
