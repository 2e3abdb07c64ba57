"""The command `pullback`: `solve` and `doctor`, and what other distributions add to it.

A distribution adds a command by an entry point in the group `pullback.commands`: its name, and a
function whose arguments typer understands. `pullback-experiments` adds `run`, `list`, `report` and
`bench`. An entry point in the group `pullback.experiments` names a function that returns the names
that `run` knows, which `solve` refers to it.
"""

__all__: list[str] = []
