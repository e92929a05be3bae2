"""Has ranks of torchrun and srun meet at the address that they are given, or says who is missing.

PyTorch waits for a wrong address, a rank that did not start or a second first rank until its time
is up, longer, or for ever, and then shows where in its C++ that was.
"""

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from fivefold.errors import Mistake, PlaceError
from fivefold.train.health.rank_status import key
from fivefold.train.ranks.fresh_store import answers_at, connected, keeps_store
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import human_seconds, ranks_named

RESOLVE_SECONDS = 30.0  # for a name server to recover, or to learn of a new pod
LEAST_POLL_SECONDS, MOST_POLL_SECONDS = 0.02, 1.0
WARNING = timedelta(seconds=30)  # after which missing ranks are named, while others wait on
INTERFACES = "GLOO_SOCKET_IFNAME"
SIZE, CAME, ALL, REFUSED = "size", "came", "all came", "refused"  # keys in the store


def check_place(env: RankEnv) -> None:
    """Check that the first rank's host has an address, and that the first rank may listen there.

    Raises:
        PlaceError: it has none, or something listens there already.
    """
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(env.master_addr, env.master_port, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                what = f"MASTER_ADDR={env.master_addr}, the host of the first rank, has no address"
                why = f"{getattr(error, 'strerror', None) or error}"
                raise PlaceError(Mistake(what, (why,))) from None
        time.sleep(0.5)
    if env.rank == 0 and not keeps_store() and answers_at(env.master_addr, env.master_port):
        what = f"the first rank cannot listen at {_place(env)}: another process does"
        why = "it may be of another run, or another first rank of this one (RANK=0)"
        raise PlaceError(Mistake(what, (why,), works=("another MASTER_PORT",)))


def check_interfaces(variables: Mapping[str, str] = os.environ) -> None:
    """Check that the network interfaces that gloo is to use exist.

    Raises:
        PlaceError: one of them is not.
    """
    given = variables.get(INTERFACES, "")
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, given.split(",")):
        if name.partition(":")[0] not in there:  # a label of an address may follow
            what = f"{INTERFACES}={given}: {socket.gethostname()} has no network interface {name}"
            why = (f"it has {', '.join(there)}",)
            raise PlaceError(Mistake(what, why, attempt=f"unset {INTERFACES}"))


def meet(env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store that the first rank hosts, once every rank has come.

    The first rank names the ranks that it waits for; if it is missing itself, one rank of each host
    says so.

    Raises:
        PlaceError: another process has the same rank, the ranks do not agree how many they are, or
            some of them have not come in time.
    """
    first, began = env.rank == 0, time.monotonic()
    deadline, warned = began + timeout.total_seconds(), began + WARNING.total_seconds()
    while not first and not answers_at(env.master_addr, env.master_port):
        if time.monotonic() > deadline:
            raise PlaceError(_unanswered(env, timeout))
        if env.local_rank == 0 and time.monotonic() > warned:
            warned = _warn(_unanswered(env, WARNING), timeout)
        time.sleep(MOST_POLL_SECONDS / 10)
    store = _store(env, timeout)
    if first:
        store.set(key(SIZE), str(env.world_size))
    elif (size := int(store.get(key(SIZE)))) != env.world_size:
        _refuse(store, f"the first rank is one of {size}, rank {env.rank} one of {env.world_size}")
    if store.add(key(CAME, env.rank), 1) > 1:
        _refuse(store, f"two processes have rank {env.rank}")
    if store.add(key(CAME), 1) == env.world_size:
        store.set(key(ALL), "")
    pause = LEAST_POLL_SECONDS
    while not store.check([key(ALL)]):
        if time.monotonic() > deadline and (absent := _absent(store, env)):
            store.set(key(REFUSED), str(_missing(absent, env, timeout)))
        if store.check([key(REFUSED)]):
            if first:
                time.sleep(2 * MOST_POLL_SECONDS)  # give others time to read it in our store
            raise PlaceError(store.get(key(REFUSED)).decode())
        if first and time.monotonic() > warned and (absent := _absent(store, env)):
            warned = _warn(_missing(absent, env, WARNING), timeout)
        time.sleep(pause)
        pause = min(2 * pause, MOST_POLL_SECONDS)
    return store


def _store(env: RankEnv, timeout: timedelta) -> dist.TCPStore:
    """The store of the first rank, which hosts it."""
    place = env.master_addr, env.master_port
    if env.rank == 0:
        return dist.TCPStore(*place, is_master=True, wait_for_workers=False, timeout=timeout)
    try:
        return connected(*place, timeout)
    except dist.DistError:
        what = f"the process that listens at {_place(env)} is not the first rank"
        why = "it does not answer as that would; it may be of another run or service"
        raise PlaceError(Mistake(what, (why,), works=("another MASTER_PORT",))) from None


def _refuse(store: dist.Store, what: str) -> None:
    store.set(key(REFUSED), what)
    raise PlaceError(what)


def _warn(absent: Mistake, timeout: timedelta) -> float:
    """Say who is missing; return when to say so again: never."""
    waits = f"waiting for up to {_text(timeout)} (--distributed-timeout-minutes)"
    print(f"warning: {absent}\n  {waits}", file=sys.stderr, flush=True)
    return math.inf


def _unanswered(env: RankEnv, time_given: timedelta) -> Mistake:
    why = "it did not start, was given another MASTER_ADDR or MASTER_PORT, or has a firewall"
    return Mistake(
        f"the first rank did not answer at {_place(env)} within {_text(time_given)}", (why,)
    )


def _absent(store: dist.Store, env: RankEnv) -> list[int]:
    return [rank for rank in range(env.world_size) if not store.check([key(CAME, rank)])]


def _missing(gone: Sequence[int], env: RankEnv, time_given: timedelta) -> Mistake:
    has = "have" if len(gone) > 1 else "has"
    what = f"{ranks_named(gone)} {has} not come to {_place(env)} within {_text(time_given)}"
    return Mistake(what, (f"{env.world_size - len(gone)} of {env.world_size} have",))


def _place(env: RankEnv) -> str:
    return f"{env.master_addr}:{env.master_port}"


def _text(timeout: timedelta) -> str:
    return human_seconds(timeout.total_seconds())
