"""`python -m pullback_experiments.tables [--check]`."""

import sys

from . import REPOSITORY, fill_tables, pages, stale


def main() -> int:
    checking = "--check" in sys.argv
    if checking:
        chosen = stale()
    else:
        chosen = pages()
    for page in chosen:
        text = page.read_text("utf-8")
        if checking or fill_tables(text) != text:
            print(page.relative_to(REPOSITORY))
        if not checking:
            page.write_text(fill_tables(text), "utf-8")
    return int(checking and bool(chosen))


if __name__ == "__main__":
    sys.exit(main())
