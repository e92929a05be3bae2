import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, run


def total(rank: int, world_size: int, offset: int) -> tuple[int, int, torch.Tensor]:
    value_1 = torch.tensor([rank + offset])
    dist.all_reduce(value_1)
    return os.getpid(), torch.get_num_threads(), value_1


def backward(rank: int, world_size: int) -> float:
    weight_2 = torch.rand(2, requires_grad=True)
    weight_2.square().sum().backward()
    assert weight_2.grad is not None
    return weight_2.grad.sum().item()


def rank_1_fails(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise ValueError("wrong shape")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int, world_size: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_takes_part(world_size):
    answers = run(world_size, total, 10)
    assert len({pid for pid, _, _ in answers}) == world_size
    assert {threads for _, threads, _ in answers} == {1}
    assert all(value_1.item() == sum(range(10, 10 + world_size)) for *_, value_1 in answers)


def test_processes_stay_and_seeds_start_again():
    assert [a[0] for a in run(2, total, 0)] == [a[0] for a in run(2, total, 0)]
    assert run(2, backward) == run(2, backward)


@pytest.mark.parametrize(
    ("how", "says"), [("raise", "ValueError: wrong shape"), ("die", "the process died")]
)
def test_a_failure_names_its_rank_and_the_next_call_works(pool, how, says):
    with pytest.raises(RankError, match=f"(?s)^rank 1 of 2: .*{says}"):
        pool.run(2, rank_1_fails, how)
    assert len(pool.run(2, total, 0)) == 2


def test_a_rank_that_hangs_is_given_up():
    with pytest.raises(RankError, match=r"no answer from ranks \[0, 1\] of 2"):
        run(2, sleep, timeout=0.2)
    assert len(run(2, total, 0)) == 2
