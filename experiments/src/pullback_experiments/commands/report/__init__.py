"""One page on all results under a folder: claims, verdicts, figures, tables, environments.

The page is one file. It needs no network, and its words, tables and figures are there without its
script, which draws the curves and makes tables sort and figures zoom.

    gather.py     the files under a folder → entries, and what was left out
    article.py    an experiment            solution.py   a solved equation
    charts.py     curves as data           pictures.py   figures that were drawn
    markup.py     escaped text, tables     page.py       the frame
"""

from __future__ import annotations

from ...framework.seeds import ranges
from .gather import gathered, write

__all__ = ["write", "gathered", "ranges"]
