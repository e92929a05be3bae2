"""Runs one training step of some ranks of a layout, one after the other or in a few processes."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.audit.routed import ChosenExperts
from fivefold.audit.traffic import axes_of, named_groups
from fivefold.audit.watch import Watch, watching
from fivefold.counts.routed import rows_of_choices
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.data.packing import Microbatch
from fivefold.errors import FivefoldError, Mistake
from fivefold.layout import Layout
from fivefold.model.moe.routing import Router
from fivefold.rehearse.kernels import one_kernel_each
from fivefold.rehearse.ledger import StepHoldings, StepLedger
from fivefold.rehearse.repeats import RepeatingRun, UnlikeMicrobatchesError
from fivefold.rehearse.script import GRADIENTS, OPTIMIZER, WEIGHTS, Script
from fivefold.rehearse.shadow import Shadow
from fivefold.rehearse.without_triton import import_kernels
from fivefold.rehearse.world import pretended_world
from fivefold.train.engine import Engine
from fivefold.train.ranks.children import leave_signals_to_parent
from fivefold.train.ranks.failures import BY_NOBODY
from fivefold.train.ranks.signals import held_back


def rehearse_ranks(
    layout: Layout,
    ranks: Sequence[int],
    *,
    gpus: bool = True,
    every: bool = False,
    processes: int = 1,
) -> list[Script]:
    """The scripts of some ranks.

    Args:
        layout: as `roles.rehearsed_layout` makes it.
        ranks: ranks to rehearse.
        gpus: whether they are to run on GPUs, or on CPUs with gloo.
        every: whether to run every microbatch, also those that repeat others.
        processes: processes in which they run; one: this one.

    Raises:
        FivefoldError: one of the processes was killed.
    """
    one = partial(rehearse_rank, layout, gpus=gpus, every=every)
    if processes == 1:
        return [one(rank) for rank in ranks]
    # Forked, as ranks are for training: this process has run no backward and has no threads.
    fork, size = multiprocessing.get_context("fork"), min(processes, len(ranks))
    with ProcessPoolExecutor(size, fork, _begin, (os.getpid(),)) as pool:
        try:
            with held_back():
                scripts = pool.map(one, ranks)
            return [*scripts]
        except BrokenProcessPool:
            what = f"one of {size} processes that rehearse ranks was killed"
            raise FivefoldError(Mistake(what, (BY_NOBODY,), attempt="--jobs 1")) from None
        except BaseException:  # a signal, or the failure of a rank: the others need not finish
            for process in multiprocessing.active_children():
                process.kill()
            raise


def rehearse_rank(layout: Layout, rank: int, *, gpus: bool = True, every: bool = False) -> Script:
    """One step of one rank, on tensors that have shapes but no values; see `rehearse_ranks`."""
    start = time.perf_counter()
    if not every:
        with suppress(UnlikeMicrobatchesError):
            return _rehearse(layout, rank, start, gpus=gpus, repeats=True)
    return _rehearse(layout, rank, start, gpus=gpus, repeats=False)


def _rehearse(layout: Layout, rank: int, start: float, *, gpus: bool, repeats: bool) -> Script:
    with warnings.catch_warnings():
        # FSDP2 calls functions of torch that torch itself has renamed.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        if gpus:
            import_kernels()
        kernels = one_kernel_each() if gpus else nullcontext()
        with pretended_world(rank, layout.grid.world_size, gpus=gpus), kernels:
            return watched_step(layout, rank, Shadow(gpus=gpus), started=start, repeats=repeats)


def watched_step(
    layout: Layout,
    rank: int,
    *watches: Watch,
    started: float | None = None,
    repeats: bool = False,
) -> Script:
    """Build the engine of a rank, run one step, and record it.

    The process group must exist, be it real or pretended.

    Args:
        layout: layout of the job.
        rank: number of this rank.
        watches: who else watches, such as a `Shadow`, by which operations run.
        started: time from which the seconds are counted, by `time.perf_counter`; None: now.
        repeats: whether microbatches that repeat others are counted instead of run.

    Raises:
        UnlikeMicrobatchesError: they do not repeat others.
    """
    started = time.perf_counter() if started is None else started
    ledger = StepLedger()
    with watching(*watches, ledger):
        engine = Engine(layout, rank, torch.device("cpu"), initialises=False)
        ledger.holdings.leave_out(engine.optimizer.host.tensors())
        ledger.holdings.count_as(OPTIMIZER, engine.optimizer.device.held())
        ledger.account = partial(_account, ledger.holdings, engine)
        ledger.account()
        engine.model.executor.observe = ledger.act
        for stage in engine.model.stages.values():
            for mixture in stage.mixtures:
                mixture.router.limit = limit_by_place
                mixture.router.turns = turns_by_place
        if layout.config.parallel.overlap_param_gather_with_optimizer_step:
            for gradients in engine.model.gradients.values():
                gradients.unshard()  # as the step before would have done
        ledger.forget()
        chosen = ChosenExperts(engine.model.stages, engine.groups)
        if repeats:
            engine.model.executor.begin = partial(RepeatingRun, ledger, chosen)
        with chosen:
            found = engine.gradients(microbatches_of(layout))
            ledger.account()
            engine.apply(found)
    every = [chosen.choices] * layout.grid.world_size  # of which all choose alike
    expected = step_volumes(layout, rank, rows_of_choices(layout, rank, every))
    holdings = ledger.holdings
    return Script(
        rank,
        {
            g.group_name: tuple(dist.get_process_group_ranks(g))
            for _, g in named_groups(engine.groups)
        },
        axes_of(engine.groups),
        tuple(ledger.issued),
        holdings.peak,
        holdings.peak_at,
        holdings.at_peak,
        ledger.operations,
        ledger.waits,
        {axis: size for axis, size in by_axis(expected).items() if size},
        ledger.acts,
        ledger.repeated,
        time.perf_counter() - started,
    )


def microbatches_of(layout: Layout) -> list[Microbatch]:
    """Microbatches of whole rows, the same on every rank, so that all route alike."""
    training = layout.config.training
    shape = training.micro_batch_size, training.seq_length
    zeros = np.zeros(shape, np.int64)
    microbatch = Microbatch(
        tokens_BS=zeros,
        labels_BS=zeros,
        positions_BS=np.broadcast_to(np.arange(shape[1]), shape).copy(),
        documents_BS=zeros,
        token_ids_BS=np.arange(zeros.size).reshape(shape),
    )
    return [microbatch] * layout.num_microbatches


def turns_by_place(token_ids_T: Tensor) -> Tensor:
    """Turns by a token's place on its rank, so that ranks with other tokens of a sequence choose
    alike."""
    return torch.arange(len(token_ids_T), device=token_ids_T.device)


def limit_by_place(router: Router, experts_TK: Tensor, logits_TE: Tensor) -> Tensor | None:
    """Which tokens experts keep if scores have no values: as with equal scores, the first ones."""
    equal_TE = experts_TK.new_zeros(logits_TE.shape, dtype=torch.float32)
    return router.within_capacity(experts_TK, equal_TE)


def _account(holdings: StepHoldings, engine: Engine) -> None:
    """Tell the ledger which tensors are weights and gradients."""
    parameters = [p for stage in engine.model.stages.values() for p in stage.parameters()]
    parameters += engine.parameters.values()
    holdings.count_as(WEIGHTS, map(_held, parameters))
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    holdings.count_as(GRADIENTS, map(_held, grads))
    for stage in engine.model.gradients.values():
        holdings.count_as(GRADIENTS, map(_held, stage.waiting_gradients()))


def _held(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, not a view of it, which would be a further
    operation."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _begin(parent: int) -> None:
    leave_signals_to_parent(parent)
    torch.set_num_threads(1)
