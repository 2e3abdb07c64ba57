"""The command `pullback`: `solve` and `doctor`, and what other distributions add to it.

A distribution adds a command by an entry point in the group `pullback.commands`: its name, and a
function whose arguments typer understands, with its `context_settings` as an attribute if it has
any. `pullback-experiments` adds `run`, `list`, `report` and `bench`. The module with these
functions may name another in `SETUP_MODULES`, which `solve` imports and which adds set-ups to
`pullback.pde.SETUPS`. An entry point in the group `pullback.experiments` names a function that
returns the names that `run` knows, which `solve` refers to it.
"""

#: modules that add set-ups to `pullback.pde.SETUPS` when they are imported
SETUP_MODULES: list[str] = []

__all__ = ["SETUP_MODULES"]
