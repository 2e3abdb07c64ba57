r"""A hook of mkdocs: ``math`` fences, written in LaTeX, become MathML; indices in words are set.

Browsers typeset MathML by themselves, so the site needs no scripts, no fonts and no network.
GitHub shows the same fences by its own means. Docstrings write x_i, w_{k+1} and e^(−d), which a
terminal can show; on a page they get subscripts and superscripts.
"""

import re
from typing import Any

from latex2mathml.converter import convert


def typeset(source: str, *_: Any, **__: Any) -> str:
    """Return the element of a page that shows `source`."""
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> None:
    """Hand ``math`` fences to `typeset`."""
    fence = {"name": "math", "class": "math", "format": typeset}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


APART = re.compile(r"<(pre|code|math|svg|a|h\d)\b.*?</\1>|<[^>]*>", re.DOTALL)  # no formulas
INDEX = re.compile(  # of one letter: no name has an underscore there
    r"_\{([^{}]+)\}|(?:(?<=(?<![A-Za-z\d_])[A-Za-z])|(?<=[α-ωΑ-Ω∇∂ℓ]))_([a-z]{1,4}|[α-ωA-Z\d])"
    r"(?![a-z\d_])"
)
POWER = re.compile(r"\^\{([^{}]+)\}|\^\(([^()]{1,12})\)|(?<=[\w)])\^([−±]?\w+(?:\.\d+)?)")


def indexed(html: str) -> str:
    """Set what follows _ and ^ in words of the page, not in code.

    >>> indexed("<p>w_{k+1} = e^(−d) x_i, <code>a_i</code></p>")
    '<p>w<sub>k+1</sub> = e<sup>−d</sup> x<sub>i</sub>, <code>a_i</code></p>'
    """
    parts = []
    end = 0
    for apart in APART.finditer(html):
        parts += [_set(html[end : apart.start()]), apart[0]]
        end = apart.end()
    return "".join([*parts, _set(html[end:])])


def _set(words: str) -> str:
    words = POWER.sub(lambda m: f"<sup>{m[1] or m[2] or m[3]}</sup>", words)
    return INDEX.sub(lambda m: f"<sub>{m[1] or m[2]}</sub>", words)


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's body with its indices set."""
    return indexed(html)
