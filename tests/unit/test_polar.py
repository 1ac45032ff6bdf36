"""Coefficient schedules: published numbers, optimality, and where they send singular values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon_core.optim.polar import CUSHION, JORDAN, SAFETY, optimal_composition, optimal_quintic, schedule

# The list that the authors give in arXiv:2505.16932, without the safety factor.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]
# Table of arXiv:2506.10935, four decimals.
PUBLISHED_CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]


def band(polynomials, lowest: float = 1.05e-3) -> tuple[float, float]:
    x = torch.logspace(torch.log10(torch.tensor(lowest, dtype=torch.float64)).item(), 0, 100_001, dtype=torch.float64)
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x.min().item(), x.max().item()


def test_polar_express_has_the_published_coefficients():
    computed = torch.tensor(optimal_composition(7, cushion=CUSHION), dtype=torch.float64)
    torch.testing.assert_close(computed[:6], torch.tensor(PUBLISHED[:6], dtype=torch.float64), rtol=0, atol=1e-11)
    # There four extrema lie within 1e-4 of one another, and any float64 Remez has eight digits left.
    torch.testing.assert_close(computed[6], torch.tensor(PUBLISHED[6], dtype=torch.float64), rtol=0, atol=1e-7)


def test_without_cushion_it_has_the_published_coefficients_of_cans():
    computed = torch.tensor(optimal_composition(5))
    torch.testing.assert_close(computed, torch.tensor(PUBLISHED_CANS), rtol=0, atol=5.1e-5)


@pytest.mark.parametrize("name", ["polar_express", "cans"])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_the_safety_factor_stretches_all_polynomials_but_the_last(name, steps):
    plain = optimal_composition(steps, cushion=CUSHION if name == "polar_express" else 0.0)
    powers = torch.tensor([SAFETY, SAFETY**3, SAFETY**5], dtype=torch.float64)
    safe = torch.tensor(schedule(name, steps), dtype=torch.float64)
    plain = torch.tensor(plain, dtype=torch.float64)
    torch.testing.assert_close(safe[:-1] * powers, plain[:-1], rtol=1e-14, atol=0)
    assert torch.equal(safe[-1], plain[-1])


def test_leaving_the_last_one_out_lifts_the_smallest_singular_value():
    without = schedule("polar_express", 5)
    everywhere = optimal_composition(10, cushion=CUSHION, safety=SAFETY)[:5]
    # The safety factors of the other four cost what lies below 1e-3 * 1.01**4.
    for lowest, before, after in ((1e-3, 0.846, 0.852), (1.05e-3, 0.870, 0.876)):
        assert band(everywhere, lowest)[0] == pytest.approx(before, abs=5e-4)
        assert band(without, lowest)[0] == pytest.approx(after, abs=5e-4)


@settings(max_examples=40, deadline=None)
@given(lower=st.floats(1e-4, 0.99), width=st.floats(1.001, 1e3))
def test_the_optimal_quintic_alternates(lower, width):
    """By Chebyshev's theorem four alternating extrema of one size prove that no odd quintic is closer to 1."""
    upper = min(lower * width, 2.0) if lower * 1.0005 < 2.0 else 2.0
    a, b, c = optimal_quintic(lower, upper)
    x = torch.linspace(lower, upper, 200_001, dtype=torch.float64)
    error = 1 - (a * x + b * x**3 + c * x**5)
    worst = error.abs().max().item()
    if worst < 1e-9:
        return  # the interval is a point to float64
    touching = (error.abs() > worst * (1 - 1e-4)).nonzero().flatten()
    signs = error[touching].sign()
    assert 1 + (signs.diff() != 0).sum().item() == 4
    assert error[0].item() == pytest.approx(worst, rel=1e-4) and error[-1].item() == pytest.approx(-worst, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("quintic", 5, 0.0, 1.21),
        ("polar_express", 5, 0.876, 1.124),
        ("polar_express", 8, 1 - 1e-6, 1 + 1e-6),
        ("polar_express", 99, 1 - 1e-12, 1 + 1e-12),
        ("cans", 5, 0.868, 1.114),
        ("cans", 8, 1 - 1e-6, 1 + 1e-6),
    ],
)
def test_bands_of_singular_values(name, steps, low, high):
    polynomials = schedule(name, steps)
    assert len(polynomials) == steps
    found = band(polynomials)
    assert low <= found[0] <= found[1] <= high


def test_schedules_are_cut_and_continued_to_the_number_of_steps():
    assert schedule("quintic", 3) == (JORDAN,) * 3
    assert schedule((2.0, -1.5, 0.5), 2) == ((2.0, -1.5, 0.5),) * 2
    two = [(1.0, 2.0, 3.0), [4, 5, 6]]
    assert schedule(two, 1) == ((1.0, 2.0, 3.0),)
    assert schedule(two, 3) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (4.0, 5.0, 6.0))
    assert schedule("aol", 4)[0] == (4.0098, -7.0585, 2.4635)
    assert schedule("polar_express", 0) == ()


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        ("polar", 5, "unknown coefficients 'polar': choose from 'quintic', 'polar_express', 'cans', 'aol'"),
        ((1.0, 2.0), 5, "three numbers"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], 5, "three numbers"),
        ((1.0, 2.0, float("nan")), 5, "three numbers"),
        ((), 5, "three numbers"),
        ("quintic", -1, "steps must be >= 0, got -1"),
    ],
)
def test_errors(coefficients, steps, message):
    with pytest.raises(ValueError, match=message):
        schedule(coefficients, steps)
