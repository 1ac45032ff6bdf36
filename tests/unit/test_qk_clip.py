"""QK-clip: logits end at the threshold, head by head, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dmuon_core.optim import Muon, QKClip, QKLayer

HEADS, DIM, WIDTH = 4, 3, 5


def scores(q: Tensor, k: Tensor, x: Tensor, key_heads: int = HEADS) -> Tensor:
    """[batch, heads, queries, keys] of query and key weights [heads * DIM, WIDTH]."""
    queries = (x @ q.T).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
    keys = (x @ k.T).unflatten(-1, (key_heads, DIM)).transpose(1, 2)
    return queries @ keys.repeat_interleave(HEADS // key_heads, 1).mT


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_logits_end_at_the_threshold(key_heads):
    q, k = nn.Parameter(randn(HEADS * DIM, WIDTH)), nn.Parameter(randn(key_heads * DIM, WIDTH, seed=1))
    x = randn(2, 6, WIDTH, seed=2)
    before = scores(q, k, x, key_heads).amax((0, 2, 3)).detach()
    threshold = before.sort().values[1:3].mean().item()  # two heads are above, two below
    clip = QKClip({"layer 0": QKLayer("q", "k", HEADS, key_heads)}, threshold)
    optimizer = Muon([("q", q), ("k", k)], qk_clip=clip)
    clip.record("layer 0", scores(q, k, x, key_heads))
    optimizer.step()  # no gradients: the clip alone
    after = scores(q, k, x, key_heads).amax((0, 2, 3)).detach()
    # The factors are float32.
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-6, atol=0)
    unchanged = [q.detach().clone(), k.detach().clone()]
    optimizer.step()  # what was recorded is used once
    assert torch.equal(q, unchanged[0]) and torch.equal(k, unchanged[1])


def test_it_comes_after_the_update_and_takes_the_largest_of_all_forwards():
    clip = QKClip({"a": QKLayer("q", "k", 2)}, threshold=1.0)
    q, k, other = (nn.Parameter(randn(4, 3, seed=seed)) for seed in range(3))
    twins = [nn.Parameter(p.detach().clone()) for p in (q, k, other)]
    clipped, plain = (
        Muon([(name, p) for name, p in zip("qko", params, strict=True)], lr=0.1, qk_clip=with_clip)
        for params, with_clip in (((q, k, other), clip), (twins, None))
    )
    for step in range(2):
        clip.record("a", torch.tensor([0.5, 4.0]))
        clip.record("a", torch.tensor([0.7, 2.0]))
        for params, optimizer in (((q, k, other), clipped), (twins, plain)):
            for index, p in enumerate(params):
                p.grad = randn(4, 3, seed=10 * step + index)
            optimizer.step()
        factors = torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64)[:, None]  # the root of 1 / 4
        with torch.no_grad():
            for p in twins[:2]:
                p.mul_(factors)
        for p, twin in zip((q, k, other), twins, strict=True):
            torch.testing.assert_close(p, twin, rtol=1e-7, atol=0)


def test_fused_projections_and_biases():
    """Rows 0-7 are queries of two heads, 8-11 the one key head; its bias is in an AdamW group."""
    weight, bias = nn.Parameter(torch.ones(16, 3)), nn.Parameter(torch.ones(16))
    layer = QKLayer(["w", "b"], ["w", "b"], heads=2, key_heads=1, head_dim=4, key_start=8)
    clip = QKClip({"a": layer}, threshold=1.0)
    groups = [{"params": [("w", weight)]}, {"params": [("b", bias)], "algorithm": "adamw"}]
    optimizer = Muon(groups, qk_clip=clip)
    clip.record("a", torch.tensor([16.0, 4.0]))
    optimizer.step()
    # Products: 1/16 and 1/4 of what they were; the key takes the root of the smaller.
    expected = torch.tensor([1 / 4] * 4 + [1.0] * 4 + [1 / 4] * 4 + [1.0] * 4)
    assert torch.equal(bias, expected)
    assert torch.equal(weight, expected[:, None].expand(16, 3))


def test_without_records_nothing_changes():
    q, k = nn.Parameter(randn(4, 3)), nn.Parameter(randn(4, 3))
    optimizer = Muon([("q", q), ("k", k)], qk_clip=QKClip({"a": QKLayer("q", "k", 2)}))
    optimizer.step()
    assert torch.equal(q, randn(4, 3)) and torch.equal(k, randn(4, 3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (QKLayer("q", "key", 2), r"layer 'a' names \['key'\], which the optimizer does not have"),
        (QKLayer("q", "k", 2, key_start=1), r"2 key heads of 2 rows from row 1 on do not fit 'k' of shape \(4, 3\)"),
        (QKLayer("q", "k", 2, query_start=-2), "layer 'a': 2 query heads of 2 rows from row -2 on do not fit 'q'"),
        (QKLayer("q", "k", 3), "layer 'a': the 4 rows of 'q' cannot be divided into 3 heads; give head_dim"),
        (QKLayer("q", "k", 2, head_dim=0), "layer 'a': head_dim must be positive, got 0"),
        (QKLayer("q", "k", 3, key_heads=2), "layer 'a' has 3 heads for 2 key heads"),
        (QKLayer("q", "k", 2, key_heads=0), "layer 'a' has 2 heads for 0 key heads"),
    ],
)
def test_unfit_layers_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        Muon([("q", nn.Parameter(randn(4, 3))), ("k", nn.Parameter(randn(4, 3)))], qk_clip=QKClip({"a": layer}))


def test_unfit_records_are_named():
    clip = QKClip({"a": QKLayer("q", "k", 2)})
    with pytest.raises(ValueError, match="no layer 'b': it has 'a'"):
        clip.record("b", torch.zeros(2))
    for shape in ((3,), (1, 3, 4, 4), (2, 2)):
        with pytest.raises(ValueError, match="the logits of layer 'a' have shape"):
            clip.record("a", torch.zeros(shape))
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        QKClip({}, threshold=0)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no layers; leave it out"):
        QKClip({})


@pytest.mark.parametrize("logit", [float("inf"), float("nan")])
def test_logits_that_are_not_finite_end_the_step(logit):
    params = [(name, nn.Parameter(randn(4, 3))) for name in ("q", "k", "q2", "k2")]
    clip = QKClip({"a": QKLayer("q", "k", 2), "b": QKLayer("q2", "k2", 2)}, threshold=1.0)
    optimizer = Muon(params, qk_clip=clip)
    for _, p in params:
        p.grad = randn(4, 3, seed=1)
    clip.record("a", torch.tensor([1.0, -torch.inf]))  # a head that a mask hides altogether
    clip.record("b", torch.tensor([logit, 1.0]))
    clip.record("b", torch.tensor([2.0, 1.0]))
    with pytest.raises(RuntimeError, match=r"logits of layer 'b' were inf or NaN.*No parameter was updated"):
        optimizer.step()
    assert all(torch.equal(p, randn(4, 3)) and not optimizer.state[p] for _, p in params)
    optimizer.step()  # a loop that passes over that step goes on
    assert all(p.isfinite().all() and not torch.equal(p, randn(4, 3)) for _, p in params)


def test_the_largest_finite_logit_leaves_finite_weights():
    q, k = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 3))
    clip = QKClip({"a": QKLayer("q", "k", 4, key_heads=2)}, threshold=1e-8)
    clip.record("a", torch.tensor([torch.finfo(torch.float32).max, 1.0, 0.0, 0.0]))
    Muon([("q", q), ("k", k)], qk_clip=clip).step()
    assert q.isfinite().all() and k.isfinite().all() and (q != 0).all() and (k != 0).all()
