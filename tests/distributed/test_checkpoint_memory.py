"""Bytes that saving and loading hold, counted by torch's allocator: at most one owned group and one rank's share more
than the format itself is made of."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils._pytree import tree_leaves

from tests.distributed.checkpoints import WHOLE, Run
from tests.distributed.counting import extra_bytes
from tests.distributed.harness import run_distributed

SLACK = 20_000  # bytes: losses, steps, pickled names, sizes that ranks tell each other


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _whole(run: Run) -> Any:
    return get_model_state_dict(run.model, options=WHOLE), get_optimizer_state_dict(
        run.model, run.optimizer, options=WHOLE
    )


def _count(folder: str) -> dict[str, int]:
    run = Run(model="wide")
    run.train(range(1))
    group = max(sum(p.numel * 4 for p in g.params) for g in run.handle.groups)
    weights = [p._local_tensor for p in run.model.parameters()]
    state = [getattr(v, "_local_tensor", v) for entry in run.optimizer.state.values() for v in entry.values()]
    found = {"group": group, "share": _bytes(weights) + _bytes(state)}
    result = _whole(run)
    found["format"] = _bytes(result)
    del result
    found["gather"] = extra_bytes(lambda: _whole(run))
    run.save_file(f"{folder}/file")
    found["write"] = extra_bytes(lambda: run.save_folder(f"{folder}/folder"))
    other = Run(model="wide", seed=3)
    other.optimizer.init_state()
    found["read the file"] = extra_bytes(lambda: other.load_file(f"{folder}/file"))
    found["read"] = extra_bytes(lambda: other.load_folder(f"{folder}/folder"))
    return found


@pytest.mark.slow
def test_gathering_and_loading_hold_one_group_more(tmp_path: Any) -> None:
    results = run_distributed(_count, 4, str(tmp_path))
    whole = results[0]["format"]
    assert whole > 3 * sum(r["group"] for r in results) // 4, "the model is too small to tell a group from the whole"
    for rank, found in enumerate(results):
        assert found["format"] == (whole if rank == 0 else 0)
        bound = found["group"] + found["share"] + SLACK
        assert bound < whole, "the bound shows nothing"
        # Rank 0 maps the file that it reads into memory.
        for what, format_itself in (("gather", True), ("read the file", True), ("write", False), ("read", False)):
            limit = bound + found["format"] * format_itself
            assert found[what] <= limit, f"rank {rank}, {what}: {found}"
