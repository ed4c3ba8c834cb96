"""Equations in numpy that more than one test compares with."""

import math

import numpy as np
from scipy.special import erfc

NODES, PARTS = np.polynomial.legendre.leggauss(300)


def weights_of_a_gaussian(m, s, n: int) -> np.ndarray:
    """Expected weights [..., n] of n keys of an axis for Gaussians with mean m and std s [...], in
    pixels: the integral of hat times density between each key and the next, in float64, and what
    lies beyond the borders."""
    m, s = (np.asarray(x, dtype=np.float64) for x in (m, s))
    way = (NODES + 1) / 2  # from a key to the next
    u = np.arange(n - 1)[:, None] + way
    z = (u - m[..., None, None]) / s[..., None, None]
    density = np.exp(-z * z / 2) / (s[..., None, None] * math.sqrt(2 * math.pi)) * PARTS / 2
    weights = np.zeros((*m.shape, n))
    weights[..., :-1] += (density * (1 - way)).sum(-1)
    weights[..., 1:] += (density * way).sum(-1)
    weights[..., 0] += erfc(m / s / math.sqrt(2)) / 2
    weights[..., -1] += erfc((n - 1 - m) / s / math.sqrt(2)) / 2
    return weights


def map_of(gaussians: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The expected map [..., T] of Gaussians [..., 4] (mean_x, mean_y, std_x, std_y) in normalised
    coordinates. A factor is at least float32's smallest normal number."""
    along = []
    for axis, n in ((1, grid[0]), (0, grid[1])):
        half = max(n - 1, 1e-9) / 2  # pixels per normalised unit
        m, s = (gaussians[..., axis] + 1) * half, gaussians[..., 2 + axis] * half
        along.append(np.maximum(weights_of_a_gaussian(m, s, n), np.finfo(np.float32).tiny))
    return (along[0][..., :, None] * along[1][..., None, :]).reshape(*m.shape, -1)


def divergence(p, q, hide_own: bool = False) -> float:
    """Mean over rows of the KL of p from q, both [..., T] and made to sum to 1, in float64, with
    0 log 0 = 0; ``hide_own``: without each row's own key."""
    visible = 1 - np.eye(p.shape[-1]) if hide_own else 1.0
    p, q = (np.asarray(rows, dtype=np.float64) * visible for rows in (p, q))
    p, q = np.broadcast_arrays(*(rows / rows.sum(-1, keepdims=True) for rows in (p, q)))
    seen = p > 0
    return (p[seen] * np.log(p[seen] / q[seen])).sum() / p[..., 0].size


def equation_9(student, teacher, hide_own: bool = False) -> float:
    """Mean over rows of GauTransformer's eq. 9 as printed: the sum over keys of T log((softmax(T) /
    t) / (softmax(G) / t)), with T the student's map and G the teacher's, both [..., T] and made to
    sum to 1; ``hide_own``: of the keys other than each row's own."""
    t = 3.0  # any: it cancels
    total = 0.0
    student, teacher = np.broadcast_arrays(student, teacher)
    for row in np.ndindex(student.shape[:-1]):
        keys = np.arange(student.shape[-1])
        if hide_own:
            keys = np.delete(keys, row[-1])
        T, G = (np.asarray(rows[row][keys], dtype=np.float64) for rows in (student, teacher))
        T, G = T / T.sum(), G / G.sum()
        softmax_T, softmax_G = (np.exp(x) / np.exp(x).sum() for x in (T, G))
        total += (T * np.log((softmax_T / t) / (softmax_G / t))).sum()
    return total / student[..., 0].size


def cross_entropies(logits, targets):
    """[B], in float64."""
    exps = np.exp(logits - logits.max(1, keepdims=True))
    return -(targets * np.log(exps / exps.sum(1, keepdims=True))).sum(1)
