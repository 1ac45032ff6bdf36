"""The harness itself: results in rank order, failures that name their rank, hangs that end."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RanksFailed, expect_errors, run_distributed


def _sum_of_ranks(offset: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_distributed(_sum_of_ranks, world_size, 10)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert all(total.item() == sum(range(world_size)) + 10 * world_size for _, total, _ in results)
    assert all(threads == 1 for _, _, threads in results)


def _fails_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_a_failure_names_its_rank_and_shows_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="the reason") as failure:
        run_distributed(_fails_on_rank_one, 2)
    assert "_fails_on_rank_one" in str(failure.value) and "rank 1: Traceback" in str(failure.value)


def _dies() -> None:
    os._exit(7)


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RanksFailed, match="exit code 7"):
        run_distributed(_dies, 1)


def _waits_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time_to_wait = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        time_to_wait.wait(["never set"])


def test_a_hang_ends_at_the_timeout_and_shows_where() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="_waits_for_nobody"):
        run_distributed(_waits_for_nobody, 2, timeout=2.0)
    assert time.monotonic() - start < 20


def _raises_everywhere(kind: str) -> None:
    raise RuntimeError(f"{kind} on rank {dist.get_rank()}")


def test_expected_errors_are_returned_for_each_rank() -> None:
    errors = expect_errors(_raises_everywhere, 2, "broken")
    assert [(error.type, error.message) for error in errors] == [
        ("RuntimeError", "broken on rank 0"),
        ("RuntimeError", "broken on rank 1"),
    ]


def test_an_expected_error_that_one_rank_misses_fails() -> None:
    with pytest.raises(AssertionError, match=r"no error on rank\(s\) \[0\]"):
        expect_errors(_fails_on_rank_one_only, 2)


def _fails_on_rank_one_only() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")


def _no_group() -> bool:
    return dist.is_initialized()


def test_a_job_can_run_without_a_process_group() -> None:
    assert run_distributed(_no_group, 1, init=False) == [False]
