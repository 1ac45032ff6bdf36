"""What the partition is told an update costs is what the update computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dmuon_core import NewtonSchulzFlops, describe
from dmuon_core.optim.cost import flops_of
from dmuon_core.optim.newton_schulz import flops, orthogonalize
from dmuon_core.partition import newton_schulz_flops


@pytest.mark.parametrize("name", ["quintic", "polar_express", "cans", "aol", ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0))])
@pytest.mark.parametrize("form", ["direct", "gram", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_it_is_what_runs(name, form, dtype):
    for steps in (0, 1, 3, 5, 8):
        cost = NewtonSchulzFlops(name, steps, dtype, form)
        for shape in ((8, 8), (4, 24), (24, 4), (1, 6)):
            with FlopCounterMode(display=False) as counted:
                orthogonalize(torch.randn(shape), name, steps, dtype=dtype, form=form)
            assert cost(shape) == counted.get_total_flops(), (steps, shape)


def test_defaults_are_those_of_the_partition_and_of_muon():
    for shape in ((4, 24), (24, 4), (7, 7)):
        assert NewtonSchulzFlops()(shape) == flops_of({})(shape) == newton_schulz_flops(shape)
    options = {"ns_steps": 3, "ns_form": "auto", "ns_dtype": "float32", "lr": 0.1, "ns_coefficients": [[2, -1, 1]]}
    same = NewtonSchulzFlops(ns_coefficients=((2, -1, 1),), ns_steps=3, ns_dtype=torch.float32, ns_form="auto")
    assert flops_of(options) == same and hash(flops_of(options)) == hash(same)


def test_auto_depends_on_the_device():
    cost = NewtonSchulzFlops(ns_form="auto", ns_dtype="float32")
    assert cost((8, 64)) == flops(8, 64, scheme="gram") < cost.on("cuda")((8, 64)) == flops(8, 64)
    there = NewtonSchulzFlops(ns_form="auto", ns_dtype="float32", device_type="cuda")
    assert there.on("cpu")((8, 64)) == flops(8, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_dtype": "int8"}, "ns_dtype must be one of bfloat16, .*got 'int8'"),
        ({"ns_form": "fast"}, "ns_form must be 'direct', 'gram' or 'auto', got 'fast'"),
        ({"ns_form": "gram"}, "the Gram form needs .*not torch.bfloat16"),
        ({"ns_steps": -1}, "steps must be >= 0"),
        ({"ns_coefficients": "jordan"}, "unknown coefficients 'jordan'"),
    ],
)
def test_unfit_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NewtonSchulzFlops(**options)


def test_describe_takes_it():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 4))
    text = describe(model, predicate=lambda name, p: name == "2.weight", flops=lambda shape: shape[0] * 10)
    assert "  640.000  " in text
