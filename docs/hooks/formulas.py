r"""A hook of mkdocs: ``math`` fences, written in LaTeX, become MathML.

Browsers typeset MathML by themselves, so that the site needs neither scripts nor fonts nor a network;
GitHub shows the same fences by its own means.
"""

from typing import Any

from latex2mathml.converter import convert


def typeset(source: str, *_: Any, **__: Any) -> str:
    r"""`source` as an element of a page.

    >>> print(typeset(r"G = A^\top A")[:41])
    <div class="formula"><math xmlns="http://
    """
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> None:
    fence = {"name": "math", "class": "math", "format": typeset}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
