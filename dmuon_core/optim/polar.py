"""Coefficient schedules of Newton-Schulz: which odd quintic polynomial each step applies. Pure Python, no tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

Quintic = tuple[float, float, float]
"""(a, b, c) of the polynomial ``a x + b x^3 + c x^5``."""

ScheduleName = Literal["quintic", "polar_express", "cans", "aol"]
Coefficients = Quintic | Sequence[Quintic] | ScheduleName

#: Steepest slope at zero that still keeps large singular values near 1; K. Jordan's post (see newton_schulz.py).
JORDAN: Quintic = (3.4445, -4.7750, 2.0315)

#: Four steps tuned for matrices whose rows were rescaled first, see ``newton_schulz.rescale_rows``. Source: T. Boissin
#: et al., arXiv:2512.04632; the numbers are those of https://github.com/thib-s/flash-newton-schulz.
_AOL: tuple[Quintic, ...] = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)

#: Smallest singular value, relative to the Frobenius norm, that the computed schedules bring to 1.
SMALLEST = 1e-3
#: Of arXiv:2505.16932, section 4.4: each polynomial is fitted from here on at least, so that it is not too steep...
CUSHION = 0.02407327424182761
#: ...and all but the last are stretched, so that rounding never leaves the interval in which they are bounded.
SAFETY = 1.01

#: Limit of the optimal quintic as its interval shrinks to the point 1: the Newton-Schulz iteration of order 5.
_LIMIT: Quintic = (15 / 8, -10 / 8, 3 / 8)


def schedule(coefficients: Coefficients, steps: int) -> tuple[Quintic, ...]:
    """The polynomial of each of ``steps`` steps. Local, pure Python.

    * a triple: the same polynomial in every step;
    * a sequence of triples: one a step, its last one repeated as often as needed;
    * "quintic": Jordan's, the default of ``torch.optim.Muon``;
    * "polar_express": the composition that is optimal for ``steps`` steps (:func:`optimal_composition`) with the
      published cushion and safety factor, which the last polynomial does without: nothing follows that it could
      protect. After five steps singular values from 1e-3 on end above 0.852 instead of 0.846, and those from
      1.05e-3 on above 0.876 instead of 0.870;
    * "cans": the same composition without the cushion, steeper at zero. Source: E. Grishina, M. Smirnov, M. Rakhuba,
      arXiv:2506.10935. They publish it without the safety factor too, with which a bfloat16 matrix of one row explodes;
    * "aol": four tuned polynomials on rows rescaled first, arXiv:2512.04632.

    Raises:
        ValueError: an unknown name, ``steps < 0``, or something that is no triple of finite numbers.
    """
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    if isinstance(coefficients, str):
        named = _named(coefficients, steps)
    elif len(coefficients) > 0 and all(isinstance(entry, (tuple, list)) for entry in coefficients):
        named = tuple(_checked(entry) for entry in coefficients)
    else:
        named = (_checked(coefficients),)
    return named[:steps] + named[-1:] * max(0, steps - len(named))


def rescales_rows(coefficients: Coefficients) -> bool:
    """Whether the schedule is made for rows that are rescaled first."""
    return isinstance(coefficients, str) and coefficients == "aol"


def _named(name: str, steps: int) -> tuple[Quintic, ...]:
    if name == "quintic":
        return (JORDAN,)
    if name == "aol":
        return _AOL
    if name == "polar_express":
        return optimal_composition(max(steps, 1), cushion=CUSHION, safety=SAFETY)
    if name == "cans":
        return optimal_composition(max(steps, 1), safety=SAFETY)
    raise ValueError(f"unknown coefficients {name!r}: choose from {', '.join(map(repr, get_args(ScheduleName)))}")


def _checked(triple: object) -> Quintic:
    message = f"coefficients must be three numbers (a, b, c), a sequence of such, or a name, got {triple!r}"
    if not isinstance(triple, (tuple, list)) or len(triple) != 3:
        raise ValueError(message)
    try:
        a, b, c = (float(value) for value in triple)
    except (TypeError, ValueError) as error:
        raise ValueError(message) from error
    if not all(map(math.isfinite, (a, b, c))):
        raise ValueError(message)
    return a, b, c


@functools.cache
def optimal_composition(
    steps: int, smallest: float = SMALLEST, *, cushion: float = 0.0, safety: float = 1.0
) -> tuple[Quintic, ...]:
    """Quintics whose composition maps ``[smallest, 1]`` as close to 1 as any composition of so many quintics does.

    Each is the best approximation of the constant 1 on the interval that the former one leaves, ``[l, 2 - l]``: the
    greedy choice is the optimal one (theorem 3.1 of the source). ``cushion`` widens each fit to ``[cushion * u, u]``,
    scaled back to be centred on 1; ``safety`` divides the argument of all polynomials but the last.

    Source: N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express", arXiv:2505.16932, algorithm 1.
    """
    lower, upper = smallest, 1.0
    found = []
    for step in range(steps):
        a, b, c = optimal_quintic(max(lower, cushion * upper), upper)
        low, high = (a * x + b * x**3 + c * x**5 for x in (lower, upper))
        scale = 2 / (low + high)
        a, b, c = scale * a, scale * b, scale * c
        lower = scale * low
        upper = 2 - lower
        stretch = safety if step + 1 < steps else 1.0
        found.append((a / stretch, b / stretch**3, c / stretch**5))
    return tuple(found)


def optimal_quintic(lower: float, upper: float) -> Quintic:
    """The odd quintic with the least largest distance from 1 on ``[lower, upper]``, by the Remez algorithm.

    The error of the best one has the same size and alternating sign at four points: both ends and, between them, the
    two extrema of the polynomial. Points and polynomial are improved in turn until the error stays.
    """
    if lower > upper * (1 - 5e-6):  # the four points are one in float64
        return tuple(k / upper**power for k, power in zip(_LIMIT, (1, 3, 5), strict=True))  # type: ignore[return-value]
    inner = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    former = math.inf
    while True:
        points = (lower, *inner, upper)
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        a, b, c, error = _solve(rows, [1.0] * 4)
        if not abs(former - error) > 1e-15:
            return a, b, c
        former = error
        root = math.sqrt(9 * b * b - 20 * a * c)  # of the derivative a + 3 b x^2 + 5 c x^4
        inner = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * size
    for k in reversed(range(size)):
        known = sum(rows[k][i] * solution[i] for i in range(k + 1, size))
        solution[k] = (rows[k][size] - known) / rows[k][k]
    return solution
