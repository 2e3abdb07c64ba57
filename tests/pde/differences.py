"""Values of a reference at points, and central differences of them."""

import numpy as np
import torch


def evaluate(reference, x, t):
    """Return the first field at x and t, broadcast against each other."""
    x, t = np.broadcast_arrays(np.asarray(x, dtype=float), np.asarray(t, dtype=float))
    points = torch.from_numpy(np.stack([x.ravel(), t.ravel()], axis=1))
    return reference(points).numpy()[:, 0].reshape(x.shape)


def derivative(f, order, s, h):
    """Central differences of order 6 (first and second derivative) and 4 (third and fourth)."""
    weights = {
        1: np.array([-1, 9, -45, 0, 45, -9, 1]) / 60,
        2: np.array([2, -27, 270, -490, 270, -27, 2]) / 180,
        3: np.array([1, -8, 13, 0, -13, 8, -1]) / 8,
        4: np.array([-1, 12, -39, 56, -39, 12, -1]) / 6,
    }[order]
    return sum(w * f(s + j * h) for j, w in zip(range(-3, 4), weights, strict=True)) / h**order
