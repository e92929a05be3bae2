"""Lets ranks that live go on with new ones in the place of those that died.

A rank that loses another one lets go of its groups and its model, which breaks the connections that
its neighbours wait on, so that within a second all ranks know; it keeps its process, its imports
and the data. The parent kills ranks that do not let go in time, starts new ones in their place, and
tells all of them to meet again: they are a new generation.
"""

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.mesh.groups import lost_connection
from fivefold.train.health.rank_status import connect, key
from fivefold.train.ranks.rank_env import RankEnv

LET_GO_SECONDS = 5.0  # for a rank to notice a failure and release everything
DECISION = timedelta(minutes=10)  # until then the parent has ended ranks that must not go on

Orders = dict[str, Any]
"""What the parent tells the ranks of a new generation; JSON."""


def keep_on(work: Callable[[RankEnv, Orders | None], int], env: RankEnv) -> int:
    """Run `work(env, orders)` until it ends by itself; repeat it, in a new generation, each time
    this rank loses another one.

    Args:
        work: what a generation does; the first one of all has no orders.
        env: this rank, in its first generation.
    """
    orders = _await_orders(env) if env.generation else None
    while True:
        try:
            return work(env, orders)
        except (ConnectionError, dist.DistError, RuntimeError) as error:
            if not lost_connection(error):
                raise
        env = replace(env, generation=env.generation + 1)
        _let_go()
        orders = _await_orders(env)


def _let_go() -> None:
    """Close every connection. Any reference to a group keeps it open; so do torch's meshes (seen in
    2.13), which DTensor's operation caches hold for ever."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
    gc.collect()
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()


def _await_orders(env: RankEnv) -> Orders:
    store = connect(env)
    if store is None:
        raise ConnectionError("the process that started the ranks is gone")
    store.set(key("let go", env.generation, env.rank), "")
    store.wait([key("orders", env.generation)], DECISION)
    orders: Orders = json.loads(store.get(key("orders", env.generation)))
    return orders


class Generations:
    """The parent's side: which ranks have let go, and what they do next.

    Args:
        store: rendezvous store of the ranks.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self._store, self._size = store, world_size
        self.latest = 0

    @property
    def waiting(self) -> set[int]:
        """The ranks that have let go, and wait for the next generation."""
        number = self.latest + 1
        return {r for r in range(self._size) if self._store.check([key("let go", number, r)])}

    def await_let_go(self, living: Callable[[], set[int]]) -> set[int]:
        """Wait until the ranks that live have let go; return those that have not in time.

        Args:
            living: tells which ranks live: one that failed like the first may still be ending.
        """
        deadline = time.monotonic() + LET_GO_SECONDS
        while (late := living() - self.waiting) and time.monotonic() < deadline:
            time.sleep(0.02)
        return late

    def begin(self, orders: Orders) -> None:
        """Start the next generation, whose new ranks have been started."""
        self.latest += 1
        with contextlib.suppress(dist.DistError):
            self._store.set(key("orders", self.latest), json.dumps(orders))
