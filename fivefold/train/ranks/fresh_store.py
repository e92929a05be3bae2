"""A store for ranks that torchrun may have started again, without what dead ranks wrote."""

import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from fivefold.train.ranks.rank_env import RankEnv

_PLACE = "fivefold/first rank's store"  # key in torchrun's store: the port
_LOOK_SECONDS = 0.05
ANSWER_SECONDS = 60.0  # within which a store answers, however many ranks ask at once


def keeps_store() -> bool:
    """Whether torchrun's agent keeps the store of its ranks when it starts them again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(env: RankEnv, timeout: timedelta) -> dist.Store:
    """A new store, hosted by the first rank; torchrun's own store only tells where it is.

    torchrun's store outlives its ranks (PyTorch 2.4 and later): groups made again under the same
    names would find the addresses of dead ranks there. One value in it can be stale as well: the
    port of a dead first rank, at which nobody answers.

    Raises:
        DistError: no first rank answers within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    shared = dist.TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout)
    if env.rank == 0:
        own = dist.TCPStore(
            env.master_addr, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        shared.set(_PLACE, str(own.port))
        return own
    while True:
        port = int(shared.get(_PLACE))
        if answers_at(env.master_addr, port):
            return dist.TCPStore(env.master_addr, port, is_master=False, timeout=timeout)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"the first rank did not answer within {timeout}")
        time.sleep(_LOOK_SECONDS)


def connected(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A connection to a store, whose methods wait for up to `timeout`.

    PyTorch waits for ever, whatever its timeout, for a process that listens there and says nothing.

    Raises:
        DistError: what listens there is no store.
    """
    made: list[dist.TCPStore | dist.DistError] = []

    def connect() -> None:
        try:
            made.append(dist.TCPStore(host, port, is_master=False, timeout=timeout))
        except dist.DistError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="connects to a store", daemon=True)
    thread.start()
    thread.join(min(ANSWER_SECONDS, timeout.total_seconds()))
    if not made:
        raise dist.DistStoreError(f"what listens at {host}:{port} does not answer as a store")
    if isinstance(made[0], dist.DistError):
        raise made[0]
    return made[0]


def answers_at(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
