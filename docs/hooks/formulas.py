r"""A hook of mkdocs: ``math`` fences, written in LaTeX, become MathML.

Browsers typeset MathML by themselves, so the site needs no scripts, no fonts and no network.
GitHub shows the same fences by its own means.
"""

from typing import Any

from latex2mathml.converter import convert


def typeset(source: str, *_: Any, **__: Any) -> str:
    """Return the element of a page that shows `source`."""
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> None:
    """Hand ``math`` fences to `typeset`."""
    fence = {"name": "math", "class": "math", "format": typeset}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
