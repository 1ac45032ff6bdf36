"""A rank that is killed while the Trainer saves over a checkpoint: the path holds the old one or the new one, whole."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import RanksFailed, run_distributed
from tests.distributed.killing import kill_me_in, kill_me_when_writing
from tests.lightning import modules
from tests.lightning.runs import assert_equal, full_weights, make_trainer, muon, state_of
from tests.lightning.test_checkpoint import AtStart

MOMENTS = 10
BULK = 8_000_000  # bytes that take some milliseconds to write
Both = tuple[dict[str, Tensor], dict[str, Tensor]]


class BulkyNet(modules.Net):
    def build(self) -> None:
        super().build()
        self.register_buffer("bulk", torch.zeros(BULK // 4))


def _save_twice(folder: bool, path: str, victim: int, moment: float, writing: bool) -> None:
    """Dies in the second save: at ``moment`` as a share of the time that the first one took, or that much of 10 ms
    after its first byte if ``writing``."""
    module = BulkyNet(muon)
    trainer = make_trainer(DMuonStrategy(save_distributed_checkpoint=folder), max_epochs=1)
    trainer.fit(module, modules.loader())
    _expect(path, "old", (full_weights(module), state_of(trainer, module)))
    dist.barrier()
    start = time.monotonic()
    trainer.save_checkpoint(path)
    duration = time.monotonic() - start
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
    for entry in trainer.optimizers[0].state.values():
        entry["momentum_buffer" if "momentum_buffer" in entry else "exp_avg"].mul_(0.5)
    _expect(path, "new", (full_weights(module), state_of(trainer, module)))
    dist.barrier()
    if dist.get_rank() == victim:
        if writing:
            kill_me_when_writing(Path(path).parent, 0.01 * moment)
        else:
            kill_me_in(moment * duration)
    trainer.save_checkpoint(path)
    time.sleep(2 * duration)  # for the victim, if the save was quicker than the first one
    raise SystemExit("the victim is alive" if dist.get_rank() == victim else "saved")


def _expect(path: str, which: str, both: Both) -> None:
    if dist.get_rank() == 0:
        torch.save(both, f"{path}.{which}")


def _load(paths: list[str]) -> list[str]:
    """Which of the two each path holds."""
    found = []
    for path in paths:
        start = AtStart()
        trainer = make_trainer(DMuonStrategy(), max_epochs=2, callbacks=[start])
        trainer.fit(BulkyNet(muon, seed=9), modules.loader(), ckpt_path=path)
        for which in ("old", "new"):
            weights, state = torch.load(f"{path}.{which}")
            if torch.equal(weights["head.weight"], start.weights["head.weight"]):
                assert_equal(start.weights, weights)
                assert_equal(start.state, state)
                found.append(which)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_killed_while_saving(folder: bool, tmp_path: Path) -> None:
    chance = random.Random(3)
    paths = []
    for index in range(MOMENTS):
        path = str(tmp_path / f"{index}" / "last.ckpt")
        (tmp_path / f"{index}").mkdir()
        moment, writing, victim = chance.uniform(0, 1), index >= MOMENTS // 2, index % 3 == 1
        with pytest.raises(RanksFailed) as failed:
            run_distributed(_save_twice, 2, folder, path, int(victim), moment, writing, timeout=60, group_timeout=20)
        assert "exit code -9" in str(failed.value), failed.value
        paths.append(path)
    found = run_distributed(_load, 2, paths)
    assert found[0] == found[1] and len(found[0]) == MOMENTS
    print(found[0])
    assert "old" in found[0], "no rank was killed in time"
