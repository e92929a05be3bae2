"""Ranks of torchrun and srun that cannot meet say so, each of them, in time."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from fivefold.errors import PlaceError
from fivefold.train.ranks import meeting
from fivefold.train.ranks.meeting import check_interfaces, check_place, meet
from fivefold.train.ranks.rank_env import RankEnv

LIMIT = timedelta(seconds=1)
PATIENCE = timedelta(seconds=20)  # for ranks that do meet, on a busy machine


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number: int = listener.getsockname()[1]
    return number


def came(port: int, ranks: Sequence[tuple[int, int]], limit: timedelta = LIMIT) -> list[str]:
    """What becomes of processes with these ranks, each of so many: empty if they meet."""
    # Kept till all have come: the first rank's is the server, which the others still ask.
    stores = []

    def come(rank: int, size: int) -> str:
        try:
            store = meet(RankEnv(rank, 0, size, 1, "127.0.0.1", port, "torchrun"), limit)
        except PlaceError as error:
            return str(error)
        stores.append(store)
        store.set(f"done {rank}", "")
        store.wait([f"done {rank}" for rank in range(size)], limit)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(come, *zip(*ranks, strict=True))]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([(0, 3), (1, 3), (2, 3)], ""),
        ([(0, 3), (1, 3), (1, 3)], "two processes have rank 1"),
        ([(0, 2), (1, 4)], "the first rank is one of 2, rank 1 one of 4"),
        ([(0, 4), (2, 4)], "ranks 1, 3 have not come to 127.0.0.1:PORT within 1.0 s"),
        ([(1, 2)], "the first rank did not answer at 127.0.0.1:PORT within 1.0 s"),
    ],
)
def test_who_is_missing_or_twice_is_said_by_every_rank(
    ranks: list[tuple[int, int]], says: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MOST_POLL_SECONDS", 0.2)
    found = came(port, ranks, LIMIT if "within" in says else PATIENCE)
    assert [said.splitlines()[:1] for said in found] == [
        says.replace("PORT", str(port)).splitlines()
    ] * len(ranks)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([(0, 3), (1, 3), (2, 3)], []),
        ([(0, 4), (2, 4)], ["ranks 1, 3 have not come to 127.0.0.1:PORT within 200 ms"]),
        ([(1, 2)], ["the first rank did not answer at 127.0.0.1:PORT within 200 ms"]),
    ],
)
def test_who_lets_others_wait_is_said_once_before_their_time_is_up(
    ranks: list[tuple[int, int]],
    says: list[str],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(meeting, "MOST_POLL_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "WARNING", timedelta(seconds=0.2) if says else PATIENCE / 2)
    came(port, ranks, LIMIT if says else PATIENCE)
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert warnings == [f"warning: {said.replace('PORT', str(port))}" for said in says]
    assert len(lines) == 3 * len(says)
    assert all("up to 1.0 s" in line for line in lines[2::3])


def test_a_taken_port_and_a_host_without_address_are_named_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check_place(RankEnv(1, 0, 2, 1, "127.0.0.1", port, "slurm"))
        with pytest.raises(PlaceError, match=f"cannot listen at 127.0.0.1:{port}"):
            check_place(RankEnv(0, 0, 2, 1, "127.0.0.1", port, "slurm"))
    monkeypatch.setattr(meeting, "RESOLVE_SECONDS", 0.0)
    for host in ("none.invalid", "n[1-2", "x" * 300):
        with pytest.raises(PlaceError, match="host of the first rank, has no address"):
            check_place(RankEnv(1, 0, 2, 1, host, port, "slurm"))


def test_a_process_that_is_no_first_rank_and_says_nothing_is_not_waited_for(port: int) -> None:
    """PyTorch would wait for it for ever."""
    with socket.create_server(("127.0.0.1", port)):
        (said,) = came(port, [(1, 2)])
    for thread in threading.enumerate():  # one still waits; Python would abort at its end
        if thread.name == "connects to a store":
            thread.join()
    assert f"listens at 127.0.0.1:{port} is not the first rank" in said


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    first, *_ = there = [name for _, name in socket.if_nameindex()]
    for right in ({}, *({"GLOO_SOCKET_IFNAME": x} for x in ("", ",".join(there), f"{first}:1"))):
        check_interfaces(right)
    for wrong in ("none0", f"{first},none0", "none0:1", f"{first} "):
        with pytest.raises(PlaceError) as caught:
            check_interfaces({"GLOO_SOCKET_IFNAME": wrong})
        what, why, attempt = str(caught.value).splitlines()
        assert what.startswith(f"GLOO_SOCKET_IFNAME={wrong}: ")
        assert why == f"  it has {', '.join(there)}"
        assert attempt == "  try:   unset GLOO_SOCKET_IFNAME"
