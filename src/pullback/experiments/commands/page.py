"""The frame of the report: one file that needs no network and works without its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

import pullback

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5c5c66; --paper: #ffffff;
  --card: #f5f5f7; --line: #dcdce2; --good: #1a7f45; --mixed: #9a6700; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf1; --soft: #a5a5b0; --paper: #17171a;
  --card: #222226; --line: #3a3a42; --good: #4cc38a; --mixed: #f0b849; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
h3 { font-size: 1.1rem; margin: 0 0 .4rem; }
small { color: var(--soft); font-weight: normal; }
article { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1rem; margin: 1rem 0; }
.claim { font-size: 1.05rem; margin: 0 0 .6rem; }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 1rem;
  padding: 0 .6rem; font-size: .85rem; font-weight: 600; }
.good, .yes > span { color: var(--good); } .mixed { color: var(--mixed); }
.bad, .no > span { color: var(--bad); } .none { color: var(--soft); }
.checks { list-style: none; padding: 0; } .checks li { padding-left: 1.6rem; margin: .25rem 0; }
.checks li > span { float: left; margin-left: -1.6rem; font-weight: 700; }
.checks em { color: var(--mixed); font-size: .85rem; }
figure { margin: 1rem 0; overflow-x: auto; background: #fff; border-radius: .4rem; }
figure img { display: block; width: 100%; min-width: 34rem; height: auto; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  overflow-wrap: normal; }
.number, .number button { text-align: right; white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible, figure:focus-visible, .wide:focus-visible, summary:focus-visible,
a:focus-visible { outline: 2px solid var(--mixed); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); border-radius: .4rem;
  font-size: .85rem; }
summary { cursor: pointer; color: var(--soft); }
a { color: inherit; }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, table = head.closest("table");
    const place = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0];
    const value = (row) => {
      const text = row.cells[place].textContent.replaceAll(",", "");
      const number = text === "inf" ? Infinity : parseFloat(text);
      return Number.isNaN(number) ? text : number;
    };
    const order = (a, b) => {
      const x = value(a), y = value(b);
      if (typeof x === "number" && typeof y === "number") return x === y ? 0 : x < y ? -1 : 1;
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return x.localeCompare(y);
    };
    body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
  });
}
"""


def page(papers: Mapping[str, Sequence[str]], left_out: Sequence[str]) -> str:
    """The whole page from sections of HTML by paper (a text), and notes (texts)."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = []
    for paper in sorted(papers):
        parts.append(f"<section><h2>{escape(paper)}</h2>\n" + "\n".join(papers[paper]))
        parts.append("</section>")
    if left_out:
        items = "".join(f"<li>{escape(line)}</li>" for line in left_out)
        parts.append(f"<section><h2>Left out</h2><ul>{items}</ul></section>")
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pullback: experiments</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header><h1>Experiments</h1>
<p><small>pullback {escape(pullback.__version__)}, {now}</small></p></header>
<main>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
