"""A rank that is killed while torch.distributed.checkpoint saves: the last complete folder is found and loads."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.checkpoints import Run, assert_same
from tests.distributed.harness import RanksFailed, run_distributed
from tests.distributed.killing import kill_me_in

MOMENTS = 10


def _train_and_die(folder: str, victim: int, moment: float) -> None:
    run = Run(model="gpt_two_layers")
    duration = 0.0
    for step in range(3):
        run.train(range(step, step + 1))
        tensors = run.tensors()
        if dist.get_rank() == 0:
            torch.save(tensors, f"{folder}/step={step}.expected")
        dist.barrier()
        if step == 2 and dist.get_rank() == victim:
            kill_me_in(moment * duration)
        start = time.monotonic()
        run.save_folder(f"{folder}/step={step}")
        duration = time.monotonic() - start
    time.sleep(2 * duration)
    raise SystemExit("done")


def _load_the_last(folders: list[str]) -> list[int]:
    """torch writes `.metadata` last, and by a rename: a folder that has it is complete."""
    found = []
    for folder in folders:
        complete = sorted(path.parent for path in Path(folder).glob("step=*/.metadata"))
        run = Run(model="gpt_two_layers", seed=9)
        run.load_folder(complete[-1])
        assert_same(run.tensors(), torch.load(f"{complete[-1]}.expected"))
        found.append(int(complete[-1].name.removeprefix("step=")))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_while_saving(tmp_path: Path) -> None:
    chance = random.Random(4)
    folders = []
    for index in range(MOMENTS):
        folder = tmp_path / f"{index}"
        folder.mkdir()
        with pytest.raises(RanksFailed) as failed:
            run_distributed(
                _train_and_die, 2, str(folder), index % 2, chance.uniform(0, 1), timeout=60, group_timeout=20
            )
        assert "exit code -9" in str(failed.value), failed.value
        folders.append(str(folder))
    found = run_distributed(_load_the_last, 2, folders)
    assert found[0] == found[1] and set(found[0]) <= {1, 2}
    print(found[0])
    assert 1 in found[0], "no rank was killed in time"
