"""Draws the figures of docs/concepts.md: `python docs/figures/concepts.py`.

picture.svg       the one picture: parameters, functions, and the circle that is pulled back
descent.svg       the same valley, seen by the gradient and by the natural gradient
grams.svg         in which form the Gram is held
conditioning.svg  why A is factorized, and not AᵀA
damping.svg       the path of damped directions
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import pullback as pb
from pullback_experiments.framework import plots

HERE = Path(__file__).parent
ORANGE, BLUE, GREEN = plots.PALETTE[:3]
# as in the demonstration, where SGD is the plain one
NATURAL = ORANGE
PLAIN = plots.PALETTE[4]
PAPER = {"bbox": {"fc": "white", "ec": "none", "pad": 1.5}}  # under words, so that no line crosses
J = np.array([[1.6, 0.9], [0.1, 0.7]])  # dφ of the little map that is drawn


def save(figure: Figure, name: str) -> None:
    """NAME.svg, the same bytes for the same figure."""
    with rc_context({"svg.hashsalt": "pullback", "svg.fonttype": "path"}):
        figure.savefig(
            HERE / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15
        )


def bare(axes: Axes, title: str) -> None:
    """No axes, only what is drawn."""
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    axes.set_title(title, color=plots.INK, size=11)


def arrow(axes: Axes, tip: np.ndarray, color: str, name: str, at: tuple[float, float]) -> None:
    """From the origin to `tip`, with a name at `at`."""
    axes.annotate("", tip, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2.2})
    axes.text(*at, name, color=color, size=11, ha="center", va="center")


def picture() -> None:
    """Left the parameters, right the functions; a circle there is an ellipse here."""
    figure = plots.make_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    turn = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(turn), np.sin(turn)])
    slope = np.array([0.55, 0.85])  # ∇ℓ among functions
    gradient = J.T @ slope
    natural = np.linalg.solve(J.T @ J, gradient)
    bare(left, "parameters  w")
    bare(right, "what the model computes  z = φ(w)")
    left.plot(*np.linalg.solve(J, circle), color=BLUE, lw=1.6)
    right.plot(*circle, color=BLUE, lw=1.6)
    right.plot(*(J @ circle * 0.45), color="#BBBBBB", lw=1.2)
    left.plot(*(circle * 0.45), color="#BBBBBB", lw=1.2)
    short = 0.75 / np.linalg.norm(slope)
    arrow(left, -natural * short, NATURAL, "−G⁺∇L", tuple(-natural * short * 1.2 + (0.32, 0.16)))
    arrow(left, -gradient * 0.42, PLAIN, "−∇L", tuple(-gradient * 0.42 * 1.2 + (-0.4, 0.0)))
    arrow(right, -slope * short, NATURAL, "−∇ℓ", tuple(-slope * short * 1.1 + (0.3, 0.02)))
    arrow(
        right,
        -J @ gradient * 0.42,
        PLAIN,
        "−J∇L",
        tuple(-J @ gradient * 0.42 * 1.14 + (-0.22, -0.12)),
    )
    right.text(1.02, 0.62, "length 1 in\nthe metric M", color=BLUE, size=9.5, ha="left")
    left.text(0.3, 1.62, "the same, pulled back:\nlength 1 in G = JᵀMJ", color=BLUE, size=9.5)
    for axes in (left, right):
        axes.plot(0, 0, "o", color=plots.INK, ms=5)
        axes.set(xlim=(-2.2, 2.2), ylim=(-1.7, 1.95))
    between = FancyArrowPatch(
        (0.44, 0.62), (0.56, 0.62), transform=figure.transFigure, arrowstyle="-|>",
        mutation_scale=18, color=plots.INK, connectionstyle="arc3,rad=-0.25",
    )  # fmt: skip
    figure.add_artist(between)
    figure.text(0.5, 0.72, "φ,  J = dφ", ha="center", color=plots.INK, size=11)
    save(figure, "picture")


def descent() -> None:
    """One least-squares loss, gradient descent and Gauss–Newton from the same start."""
    figure = plots.make_figure(9.2, 3.3)
    left, right = figure.subplots(1, 2)
    wide = np.array([[1.0, 0.0], [0.0, 0.2]]) @ np.array([[0.8, 0.6], [-0.6, 0.8]])
    start = np.array([-1.4, 1.7])
    x, y = np.meshgrid(np.linspace(-2, 2, 121), np.linspace(-2, 2, 121))
    values = wide @ np.stack([x.ravel(), y.ravel()])
    levels = (values**2).sum(0).reshape(x.shape)
    path = [start]
    for _ in range(25):
        path.append(path[-1] - 1.6 * wide.T @ wide @ path[-1])
    natural = [start * (1 - 0.5) ** k for k in range(9)]
    for axes, map_, title in (
        (left, np.eye(2), "in the parameters the valley is narrow"),
        (right, wide, "among functions the loss is round"),
    ):
        bare(axes, title)
        if axes is left:
            axes.contour(x, y, levels, levels=np.geomspace(0.01, 3, 8), colors="#CCCCCC")
        else:
            for radius in np.sqrt(np.geomspace(0.01, 3, 8)):
                turn = np.linspace(0, 2 * np.pi, 200)
                axes.plot(radius * np.cos(turn), radius * np.sin(turn), color="#CCCCCC")
        for points, color, name in (
            (path, PLAIN, "gradient"),
            (natural, NATURAL, "natural gradient, steps of ½"),
        ):
            line = map_ @ np.array(points).T
            axes.plot(*line, "o-", color=color, ms=3.5, lw=1.5, label=name)
        axes.plot(0, 0, "*", color=plots.INK, ms=10)
    left.set(xlim=(-2, 2), ylim=(-1.2, 2))
    right.set(xlim=(-0.75, 0.75), ylim=(-0.2, 0.62))
    left.legend(frameon=False, fontsize=9, loc="lower left")
    save(figure, "descent")


def grams() -> None:
    """A wide and a tall A, with the two squares that can be made of them."""
    figure = plots.make_figure(9.2, 2.6)
    axes = figure.subplots()
    bare(axes, "")
    row = [
        ("rows  A\nn × p", 6.0, 2.0, BLUE, "keeps all digits"),
        ("kernel  AAᵀ\nn × n", 2.0, 2.0, GREEN, "small if p > n"),
        ("dense  AᵀA\np × p", 6.0, 6.0, ORANGE, "small if p ≤ n"),
        ("matrix-free\nv ↦ Aᵀ(Av)", 0.35, 6.0, "#7F7F7F", "a few vectors"),
        ("Kronecker\nR ⊗ C per layer", 2.2, 2.2, plots.PALETTE[3], "not exact"),
    ]
    place = 0.0
    for name, width, height, color, note in row:
        style = {"fc": color, "alpha": 0.3}
        axes.add_patch(Rectangle((place, -height / 2), width, height, **style))
        if name.startswith("Kronecker"):
            axes.add_patch(Rectangle((place + 2.6, -0.8), 1.6, 1.6, **style))
            width = 4.2
        middle = place + width / 2
        axes.text(middle, 3.4, name, ha="center", va="bottom", size=9.5, color=plots.INK)
        axes.text(middle, -3.4, note, ha="center", va="top", size=9, color=plots.INK)
        place += max(width, 3.2) + 2.6
    axes.set(xlim=(-1.5, place - 1), ylim=(-4.6, 5.6))
    save(figure, "grams")


def conditioning() -> None:
    """Error of the solution against the condition of A, from A and from AᵀA."""
    torch.manual_seed(0)
    figure = plots.make_figure(5.6, 3.2)
    axes = figure.subplots()
    powers = torch.arange(0, 15)
    errors = {"from r, with A": [], "from g, with A": [], "from g, with AᵀA": []}
    for power in powers:
        u, v = (torch.linalg.qr(torch.randn(20, 20).double())[0] for _ in range(2))
        A = u @ torch.diag(torch.logspace(0, -float(power), 20, dtype=torch.float64)) @ v
        w = torch.randn(20).double()
        solver = pb.solvers.PseudoInverse(rcond=1e-15)
        state = solver.init(pb.grams.Rows(A))
        squared = solver.init(pb.grams.Dense(A.T @ A))
        g = A.T @ (A @ w)
        for name, x in (
            ("from r, with A", solver.solve(state, g, whitened=A @ w).x),
            ("from g, with A", solver.solve(state, g).x),
            ("from g, with AᵀA", solver.solve(squared, g).x),
        ):
            errors[name].append(float((x - w).norm() / w.norm()))
    places = ((1e10, 1e-9), (1.5e5, 1.5e-8), (1e3, 1e-3))
    for (name, values), color, at in zip(
        errors.items(), (GREEN, BLUE, ORANGE), places, strict=True
    ):
        axes.plot(10.0 ** powers.double().numpy(), values, "o-", color=color, ms=3.5)
        axes.text(*at, name, color=color, size=9.5, va="center")
    plots.format_axes(axes)
    axes.set_ylim(1e-16, 1e2)
    plots.label(axes, "condition number of A", "relative error of the solution")
    save(figure, "conditioning")


def damping() -> None:
    """(G + λ)⁻¹g from the natural gradient (λ = 0) to the gradient's direction (λ → ∞)."""
    figure = plots.make_figure(5.6, 3.2)
    axes = figure.subplots()
    A = torch.tensor([[1.0, 0.2], [0.1, 0.15]]).double()
    r = torch.tensor([0.5, 0.35]).double()
    solver = pb.solvers.PseudoInverse()
    state = solver.init(pb.grams.Rows(A))
    path = [
        solver.solve(state, A.T @ r, float(s), whitened=r).x for s in np.geomspace(1e-6, 30, 90)
    ]
    x, y = np.meshgrid(np.linspace(-0.15, 0.7, 100), np.linspace(-0.35, 2.7, 100))
    points = torch.tensor(np.stack([x.ravel(), y.ravel()]))
    model = ((A @ points - r[:, None]) ** 2).sum(0).reshape(x.shape).numpy()
    axes.contour(x, y, model, levels=np.geomspace(1e-4, 0.5, 9), colors="#CCCCCC")
    axes.plot(*torch.stack(path).T.numpy(), color=NATURAL, lw=2.2)
    end = path[0].numpy()
    axes.plot(*end, "o", color=NATURAL, ms=6)
    axes.text(
        end[0] + 0.04, end[1], "λ = 0: the natural gradient", color=NATURAL, size=9.5, **PAPER
    )
    gradient = (A.T @ r).numpy()
    axes.annotate(
        "", gradient * 0.5, (0, 0), arrowprops={"arrowstyle": "-|>", "color": PLAIN, "lw": 2}
    )
    axes.text(0.1, -0.24, "the gradient", color=PLAIN, size=9.5, **PAPER)
    axes.text(0.02, 0.32, "λ large", color=NATURAL, size=9.5, **PAPER)
    axes.plot(0, 0, "o", color=plots.INK, ms=5)
    plots.format_axes(axes, logx=False, logy=False)
    axes.set(xlim=(-0.15, 0.7), ylim=(-0.35, 2.7), xticks=[], yticks=[])
    plots.label(axes, title="directions at every damping, from one factorization")
    save(figure, "damping")


if __name__ == "__main__":
    for draw in (picture, descent, grams, conditioning, damping):
        draw()
