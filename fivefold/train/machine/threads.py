"""Chooses the number of CPU threads of a rank: as many as its work can use."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fivefold.layout import Layout

EXPLICIT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
GRAIN = 32_768
"""Fewest elements that torch gives to a thread in elementwise operations
(at::internal::GRAIN_SIZE). With fewer elements, further threads mostly wait, and occupy a core each
while they do: `benchmarks/threads.py`."""


_NUMBERS = re.compile(r"\s*0*[1-9]\d*\s*(,\s*\d+\s*)*")


@dataclass(frozen=True)
class Threads:
    """The number of a rank's threads, with the reason for it."""

    count: int
    why: str


def said_in(variables: Mapping[str, str]) -> str | None:
    """The environment variable that sets the number of threads of a process; None if none does.

    OpenMP reports a value that is empty or no number as invalid, and ignores it.
    """
    given = (name for name in EXPLICIT if _NUMBERS.fullmatch(variables.get(name, "")))
    return next(given, None)


def choose_threads(
    layout: Layout, ranks: int, device_type: str, variables: Mapping[str, str] = os.environ
) -> Threads:
    """Choose the threads of each rank; a number in the environment is kept.

    The choice depends on the layout and the machine, not on what else runs there, because the
    order of sums, and so the last bits of a run, depend on it.

    Args:
        layout: layout of the run.
        ranks: number of ranks on this machine.
        device_type: "cpu"; or "cuda", where threads only launch kernels and load data.
        variables: environment variables.
    """
    cores = torch.get_num_threads()
    if name := said_in(variables):
        return Threads(cores, name)
    share = max(1, cores // ranks)
    shared = f"{cores} cores / {ranks} ranks here" if ranks > 1 else f"{cores} cores"
    if device_type != "cpu":
        return Threads(share, shared)
    parallel, training = layout.config.parallel, layout.config.training
    tokens = training.micro_batch_size * training.seq_length
    tokens //= layout.grid.cp * parallel.num_sequence_slices
    features = layout.config.model.hidden_size // layout.grid.tp
    useful = max(1, tokens * features // GRAIN)
    work = f"{tokens:,} tokens x {features:,} features of a microbatch, {GRAIN:,} a thread"
    return Threads(useful, work) if useful < share else Threads(share, shared)
