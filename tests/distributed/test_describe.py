"""describe(): what it says of a plain model is what dedication then does; the text is tested in tests/unit."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_distributed
from tests.distributed.models import GPT, hidden_matrix


def _before_and_after() -> tuple[str, str]:
    from dmuon_core import dedicate_params, describe, no_sync

    model = GPT()
    before = describe(model, 2, 2, hidden_matrix)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dedicated = dedicate_params(model, mesh, hidden_matrix)
    after = describe(model)
    for group in dedicated.groups:
        for param in group.params:
            row, column = divmod(dedicated.assignment.owners[param.fqn], 2)
            assert param.owned.is_home == (dist.get_rank() == 2 * row + column), param.fqn
    with no_sync(model):  # the text does not depend on what the model is doing
        assert describe(model) == after
    return before, after


def test_a_plain_model_is_described_as_it_will_be() -> None:
    texts = run_distributed(_before_and_after, 4)
    assert len({text for pair in texts for text in pair}) == 1
    assert "replica 1, shard rank 1" in texts[0][0]


def _split_once() -> None:
    from dmuon_core import Muon, dedicate_params

    model = GPT()
    names = [name for name, param in model.named_parameters() if hidden_matrix(name, param)]
    rule = {"*.attn.q.weight": 2}
    dedicated = dedicate_params(model, init_device_mesh("cpu", (2,)), hidden_matrix, split=rule)
    parts = {spec.fqn: spec.parts for spec in dedicated.assignment.specs}
    for optimizer, divided in ((Muon(model), ".q."), (Muon(model, split={"*.attn.k.weight": 2}), ".k.")):
        group = optimizer.param_groups[0]
        specs = dict(zip(group["param_names"], group["split"], strict=True))
        assert specs == {name: "rows:2" if divided in name else None for name in names}
    for name in names:
        rows, columns = model.get_parameter(name).shape
        assert parts[name] == (((rows // 2, columns),) * 2 if ".q." in name else ((rows, columns),)), name


def test_the_split_that_balances_owners_is_the_default_of_the_optimizer() -> None:
    run_distributed(_split_once, 2)
