"""The colors of all figures, drawn or on a page."""

from __future__ import annotations

#: Okabe and Ito's, which color-blind readers can tell apart
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
