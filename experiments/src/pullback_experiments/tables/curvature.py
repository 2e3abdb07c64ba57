"""How well influence predicts retraining, how long it takes, and posteriors under rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .numbers import Rows, record

#: columns of the tables of scores, and their records
_TASKS = {
    "MNIST": "influence-mnist",
    "CIFAR-2": "influence-cifar",
    "text": "influence-text",
}
#: methods by the words of the page, and their names in the records
_METHODS = {
    "EK-FAC, chosen damping": "EK-FAC",
    "EK-FAC, default damping": "EK-FAC, default damping",
    "TRAK, 10 models": "TRAK, 10 models",
    "TRAK, 1 model": "TRAK, 1 model",
    "gradient dot product": "gradient dot product",
    "K-FAC, chosen damping": "K-FAC",
    "kronfluence 1.0.1, chosen damping": "kronfluence, weight decay",
    "kronfluence 1.0.1, its default damping": "kronfluence",
}
#: multiples of the mean eigenvalue that were compared for the default
_MULTIPLES = ("0.03", "0.1", "0.3", "1", "3")
_ANGLES = ("0.0", "30.0", "60.0")


def _find_run(name: str, *key: str) -> dict[str, Any]:
    """Return the record of an item that has one seed."""
    (run,) = [run for run in record(name)["runs"] if run["key"] == list(key)]
    return run["record"]


def influence() -> Rows:
    """Linear datamodeling scores of all methods in three tasks."""
    scores = {task: _find_run(name, "datamodeling")["scores"] for task, name in _TASKS.items()}
    rows = [["method", *_TASKS]]
    for words, method in _METHODS.items():
        cells = []
        for task in _TASKS:
            score = scores[task].get(method)
            cells.append("–" if score is None else f"{score:.3f}")
        rows.append([words, *cells])
    return rows


def influence_dampings() -> Rows:
    """Linear datamodeling scores of EK-FAC by its damping."""
    rows = [["", *_MULTIPLES]]
    for task, name in _TASKS.items():
        by_damping = _find_run(name, "datamodeling")["by damping"]
        rows.append([task, *[f"{by_damping[multiple]:.3f}" for multiple in _MULTIPLES]])
    return rows


def influence_scale() -> Rows:
    """Seconds and memory of a fit and of scores."""
    images = _find_run("influence-scale", "resnet9")
    decoder = _find_run("influence-scale", "gpt2")["1000 sequences"]
    rows = [["", "fit", "score", "largest memory"]]
    by_precision = {
        "ResNet-9, float32": "float32",
        "TF32 products": "TF32",
        "TF32 products, bfloat16 scores": "TF32, bfloat16 scores",
    }
    for words, precision in by_precision.items():
        rows.append(_time(words, images[f"{precision}: fit"], images[f"{precision}: score"]))
    words = "decoder, TF32 products, bfloat16 scores"
    rows.append(_time(words, decoder["fit"], decoder["score"]))
    return rows


def _time(words: str, fit: dict[str, float], score: dict[str, float]) -> list[str]:
    gigabytes = max(fit["gigabytes"], score["gigabytes"])
    return [words, f"{fit['seconds']:.1f} s", f"{score['seconds']:.1f} s", f"{gigabytes:.0f} GB"]


def laplace_rotation() -> Rows:
    """Posteriors of image classifiers on turned images, as means over seeds."""
    rows = [["network, posterior", "0°", "30°", "60°"]]
    names = {
        "convolutional": "convolutional",
        "batch and layer normalization": "normalized",
        "LSTM": "LSTM",
    }
    for words, name in names.items():
        reports = [run["reports"] for run in _list_runs(name)]
        rows.append(_rotate(f"{words}, plain", [r["plain network"] for r in reports]))
        rows.append(_rotate(f"{words}, EK-FAC", [r["pullback EK-FAC"] for r in reports]))
        if name == "convolutional":
            rows.append(_rotate(f"{words}, K-FAC", _list_runs(name, "K-FAC")))
            cells = [_rotate("", _list_runs(name, "laplace-torch", a), [a])[1] for a in _ANGLES]
            rows.append([f"{words}, laplace-torch, Kronecker", *cells])
    return rows


def _list_runs(*key: str) -> list[dict[str, Any]]:
    """Return the records of an item of the rotation for all seeds."""
    runs = record("laplace-rotation")["runs"]
    return [run["record"] for run in runs if run["key"] == list(key)]


def _rotate(
    words: str, reports: Sequence[dict[str, Any]], angles: Sequence[str] = _ANGLES
) -> list[str]:
    """Return the mean negative log-likelihood and calibration error of every angle."""
    cells = []
    for angle in angles:
        nll = sum(report[angle]["nll"] for report in reports) / len(reports)
        calibration = sum(report[angle]["calibration"] for report in reports) / len(reports)
        cells.append(f"{nll:.3f} ({calibration:.3f})")
    return [words, *cells]
