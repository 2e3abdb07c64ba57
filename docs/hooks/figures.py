"""A hook of mkdocs: a figure opens at full size; numbers stay whole, sentences of tables get room.

The pages stay plain Markdown, which GitHub shows as well.
"""

import re
from typing import Any

FIGURE = re.compile(r'<p>(<img [^>]*?src="([^"]+)"[^>]*>)')
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
APART = re.compile(r"<(pre|math|svg)\b.*?</\1>|<[^>]*>", re.DOTALL)  # no words of the page
NUMBER = re.compile(  # 1e-3, −0.6 ± 1.4, 24 ms, 65 %, 2026-11-17, K-FAC, ResNet-50, L = 1
    r"\b\d[\d.]*e[-−+]\d+|[-−]?\d[\d.]* ± [\d.]+|\b\d[\d.]* (?:(?:ms|s|[MGT]i?B)\b|%)"
    r"|\b\d{4}-\d\d-\d\d\b|\b\d-D\b|\b[A-Z][A-Za-z]{0,5}-(?:[A-Z]+\b|\d+\b)|\b[A-Z] = \d+\b"
)


def linked(html: str) -> str:
    """Put a link to the file around every figure."""
    return FIGURE.sub(r'<p><a href="\2">\1</a>', html)


def unbroken(html: str) -> str:
    """Mark numbers and names with a hyphen, so that a line never ends inside one."""
    parts = []
    end = 0
    for apart in APART.finditer(html):
        parts += [_marked(html[end : apart.start()]), apart[0]]
        end = apart.end()
    return "".join([*parts, _marked(html[end:])])


def _marked(words: str) -> str:
    return NUMBER.sub(r'<span class="number">\g<0></span>', words)


def roomy(html: str) -> str:
    """Mark the cells of tables that hold sentences, so that they stay wide on a phone."""

    def mark(cell: re.Match[str]) -> str:
        words = len(re.sub("<[^>]*>", "", cell[0])) > 40
        if words:
            return cell[0].replace("<td", '<td class="words"', 1)
        return cell[0]

    return CELL.sub(mark, html)


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's body with all three."""
    return unbroken(roomy(linked(html)))
