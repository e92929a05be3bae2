"""Runs a rank that torchrun or srun has started; without a parent, ranks watch each other."""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fivefold.errors import FivefoldError
from fivefold.files import telling_system_errors
from fivefold.train.health.rank_status import (
    StatusResponder,
    answers,
    ask_ranks,
    connect,
    find_suspect,
    key,
    process_of,
)
from fivefold.train.ranks import failures
from fivefold.train.ranks.failures import Failure
from fivefold.train.ranks.fresh_store import keeps_store
from fivefold.train.ranks.launch import Worker, place_name
from fivefold.train.ranks.local_ranks import SEARCH_SECONDS
from fivefold.train.ranks.meeting import check_place
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.ranks.signals import leave_at_once

CAUSE = "cause"  # key in the store: a rank failed by itself
ALL_LEFT = "all left"  # key in the store: every rank needs it no longer
LINGER_SECONDS = 5.0  # time for which a first rank that ends alone keeps the store
REPORTED = "reported"  # key in the store: a rank has printed which rank the others waited for


def run_started(
    worker: Worker,
    env: RankEnv,
    *,
    describe: Callable[[int], str] | None = None,
    errors_folder: Path | None = None,
) -> int:
    """Run `worker(env)` in this process and return its exit status, as `launch_local` does.

    Ranks that failed by themselves print why, each message once. If there are none, the first rank
    that lost a connection or waited too long asks all ranks, and names the one at fault. A rank
    that failed ends here: destroying NCCL's groups would wait for all that is queued.
    """
    leave_at_once()
    check_place(env)
    failure: Failure | None = None
    with StatusResponder(env):
        try:
            with telling_system_errors(FivefoldError):
                status = worker(env) or 0
        except (Exception, SystemExit) as error:
            failure = failures.raised(error, env.rank, errors_folder)
            status = failure.status
            _tell_torchrun(error)
            _explain(failure, env, describe, errors_folder)
    if failure is None:
        _end_groups(env)
        return status
    if (store := connect(env)) is not None:
        _leave(store, env, keeps_store())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_groups(env: RankEnv) -> None:
    """Destroy the process groups; the first rank keeps their store until no rank uses it."""
    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    _leave(store, env)


def _explain(
    failure: Failure,
    env: RankEnv,
    describe: Callable[[int], str] | None,
    errors_folder: Path | None,
) -> None:
    """Print why this rank failed, if no other one has said the same."""
    store = connect(env)
    if store is not None and failure.consequence:
        _ask(store, env, failure, describe, errors_folder)
        return
    if store is not None:
        store.set(key(CAUSE), "")
        digest = hashlib.sha256(failure.cause.encode()).hexdigest()
        if store.add(key(f"said {digest}"), 1) > 1:
            return
    failures.explain(failure, place_name(env.rank, describe), env.world_size)


def _tell_torchrun(error: BaseException) -> None:
    """Write an unexpected error to the file where torchrun's summary of failed ranks looks for it.

    torchrun may end this rank at any moment, and would itself fail on half a file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not isinstance(error, FivefoldError | SystemExit):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        part = os.environ["TORCHELASTIC_ERROR_FILE"] = f"{path}.part"
        get_error_handler().record_exception(error)
        with contextlib.suppress(OSError):  # torch tells why it could not write
            os.replace(part, path)


def _ask(
    store: dist.Store,
    env: RankEnv,
    failure: Failure,
    describe: Callable[[int], str] | None,
    errors_folder: Path | None,
) -> None:
    """Let one rank find and print which rank the others waited for, while they wait: the launcher
    ends all ranks as soon as one has exited."""
    store.set(key("waited", env.rank), failure.place)
    if store.add(key("asking"), 1) > 1:
        _await(store, REPORTED, 2 * SEARCH_SECONDS)
        return
    ranks = range(env.world_size)
    question = ask_ranks(store, env.world_size)
    if _await(store, CAUSE, SEARCH_SECONDS):
        return
    waited = {r: key("waited", r) for r in ranks}
    places = {r: store.get(k).decode() for r, k in waited.items() if store.check([k])}
    given = answers(store, ranks, question)
    silent = {r: process_of(store, r) for r in ranks if r not in places}
    rank, cause = env.rank, failure
    if (suspect := find_suspect(silent, given)) is not None:
        rank = suspect.rank
        cause = failures.suspected(suspect, (env.rank, failure), errors_folder)
    else:
        cause = failures.disagreeing(failure, places | {r: given[r].place for r in silent})
    failures.explain(cause, place_name(rank, describe), env.world_size)
    store.set(key(REPORTED), "")


def _leave(store: dist.Store, env: RankEnv, outlives: bool = False) -> None:
    """Give others time to read what was said, and leave the store before the first rank takes it
    down: torch prints its stack for ranks that still wait there.

    Args:
        store: store of the run.
        env: environment of this rank.
        outlives: whether the store stays when the first rank goes.
    """
    with contextlib.suppress(dist.DistError):  # the first rank did not stay any longer
        if store.add(key("left"), 1) == env.world_size:
            store.set(key(ALL_LEFT), "")
        elif env.rank == 0 and not outlives:
            _await(store, ALL_LEFT, LINGER_SECONDS)


def _await(store: dist.Store, name: str, seconds: float) -> bool:
    """Whether a key appears in the store within this time."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(dist.DistError):
        store.wait([key(name)], timedelta(seconds=seconds))
        return True
    time.sleep(max(0.0, deadline - time.monotonic()))  # a store that is gone answers at once
    return False
