"""A hook of mkdocs: the gallery shows the whole program below each line that names it.

The page stays plain Markdown; what is shown is the file that the tests run.
"""

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
#: a paragraph that begins with the name of a program
PROGRAM = re.compile(r"^`(?P<path>examples/\w+\.py)`: [^\n]*(?:\n[^\n]+)*", re.MULTILINE)


def include_programs(markdown: str) -> str:
    """Return a page with the program after each paragraph that begins with its name.

    The first one is open; a click opens the others.
    """
    first = PROGRAM.search(markdown)

    def show(paragraph: re.Match[str]) -> str:
        code = (REPOSITORY / paragraph["path"]).read_text("utf-8").rstrip("\n")
        lines = [f"    {line}".rstrip() for line in ["```python", *code.splitlines(), "```"]]
        is_first = first is not None and paragraph.start() == first.start()
        fold = "???+" if is_first else "???"
        heading = f'{fold} example "The program, {paragraph["path"]}"'
        return "\n".join([paragraph[0], "", heading, "", *lines])

    return PROGRAM.sub(show, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the Markdown of a page, the gallery with its programs."""
    if page.file.src_uri == "gallery.md":
        return include_programs(markdown)
    return markdown
