"""Predicts the memory that the framework of a published run reports, and whether the run fits.

Megatron-LM publishes `max_memory_allocated`, which `predict.memory` predicts. nanotron and
torchtitan publish the memory that the allocator has reserved, which depends on the order of
allocations: their steps are replayed, for models without experts.
"""

from dataclasses import dataclass, replace
from typing import Any

from fivefold.counts.policy import StatePolicy, megatron_policy
from fivefold.counts.shards import num_shards
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.software import Software
from fivefold.published.frameworks.framework import Framework
from fivefold.published.replay.step import Replay
from fivefold.published.row import PublishedRow
from fivefold.published.runs import Choice, software_of

_COMMUNICATOR = 1e9  # of NCCL, on H100s: 0.7 to 3.3 GB in its issues 964 and 1685


@dataclass(frozen=True)
class Peak:
    """The predicted peak memory of a published run.

    Attributes:
        reported: bytes that the framework reports, for the rank that it reports.
        fits: whether all ranks have enough memory.
    """

    reported: float
    fits: bool


def published_peak(row: PublishedRow, choice: Choice, cluster: Cluster) -> Peak:
    """The peak memory of a row's run in one of its configurations."""
    layout, replays = choice.layout, _replays(row, choice, cluster)
    if replays:
        ranks = [replay.run() for replay in replays]
        most = [rank.most_reserved for rank in ranks]
        reported = most[0] if replays[0].reports_first else max(most)
        return Peak(reported, not any(rank.overflowed for rank in ranks))
    loss = {} if choice.framework.separate_loss else _loss_of(row)
    run = replace(layout, config=layout.config.with_values(**loss))
    full = replace(cluster, memory_margin=0.0)  # it ran, or did not
    habits = software_of(row, choice.framework)
    compiled = "torch.compile" in row.text("note")
    policy = _policy_of(layout, choice.framework, habits, compiled=compiled)
    predicted = peak_memory(run, full, policy=policy, software=habits)
    return Peak(predicted.max_allocated, predicted.fits)


def published_fits(row: PublishedRow, choice: Choice, cluster: Cluster) -> bool:
    """`published_peak(...).fits`, which takes less time where a run does not fit."""
    replays = _replays(row, choice, cluster)
    if replays:
        return all(replay.fits() for replay in replays)
    return published_peak(row, choice, cluster).fits


def _replays(row: PublishedRow, choice: Choice, cluster: Cluster) -> list[Replay]:
    """The replays of a run's extreme ranks; none where its peak is predicted otherwise."""
    layout, replay = choice.layout, choice.framework.replay
    if replay is None or layout.config.model.num_experts:
        return []
    left = cluster.gpu.memory_bytes - cluster.reserved_bytes
    left -= replay.communicators * _COMMUNICATOR
    return [replay.of(row, layout, rank, left) for rank in _extremes(layout)]


def _extremes(layout: Layout) -> list[int]:
    """The pipeline ranks of which one is fullest: the first two, and the last with the loss."""
    return sorted({0, min(1, layout.grid.pp - 1), layout.grid.pp - 1})


def _policy_of(
    layout: Layout, framework: Framework, habits: Software, *, compiled: bool
) -> StatePolicy | None:
    """The state policy of a framework, of Megatron-LM, or of Fivefold if weights are sharded.

    A single data-parallel rank shards nothing, and computes with the weights that it updates. Its
    backward is one graph if the model is compiled; hooks of sharding cut it at every layer.
    """
    sharding = layout.config.parallel.sharding
    if framework.held is None:
        return None if sharding.splits_parameters else megatron_policy(sharding.splits_optimizer)
    copy, gradient, master, moments = framework.held
    shared = num_shards(layout) > 1
    whole = shared and habits.reduces_last and layout.num_microbatches > 1
    if whole:
        gradient = habits.gradient_bytes or gradient
    if not shared and copy == master:
        copy = 0.0
    return StatePolicy(
        copy=copy,
        narrow_copy=copy,
        gradient=gradient,
        master=master,
        moments=moments,
        splits_copy=sharding.splits_parameters,
        splits_gradient=sharding.splits_gradients and not whole,
        splits_optimizer=sharding.splits_optimizer,
        fresh=2.0,
        fresh_at_once=compiled and not shared,
        whole_embedding=habits.whole_embedding,
    )


def _loss_of(row: PublishedRow) -> dict[str, Any]:
    """The kind of Megatron-LM's loss: in an fp32 copy of the logits, or fused, in the logits."""
    fused = "te" if "ce fusion" in row.text("note") else "native"
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": fused}
