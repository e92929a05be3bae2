"""Predicts the peak memory of each pipeline rank, its parts, and when in the step it occurs.

A liveness analysis of the program adds up, at every pipeline action, the model state
(`counts.state`), the activations kept between forward and backward (`description.activations`),
what deferred weight gradients keep, and what exists only during the action. All sizes are bytes on
one device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.counts.policy import StatePolicy, layout_policy
from fivefold.counts.state import ModelState, model_state, stages_held
from fivefold.description.activations import Running
from fivefold.description.kinds import layer_kind
from fivefold.layout import Layout
from fivefold.pipeline.ir import Kind
from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.muon import orthogonalising_bytes
from fivefold.predict.memory.liveness import Acts, HeldMicrobatches, moments
from fivefold.predict.memory.points import ActPoint
from fivefold.predict.memory.stage import StageBytes, stage_bytes
from fivefold.predict.software import Software

OPTIMIZER = "optimizer step"


@dataclass(frozen=True)
class RankMemory:
    """The peak of one pipeline rank.

    Attributes:
        pp_rank: number of the pipeline rank.
        phase: phase of the step in which the peak occurs.
        act: description of the pipeline action at which the peak occurs.
        parts: bytes of each part of the peak; their sum is the peak.
        phases: peak bytes of each phase of the step.
        host: most bytes in host memory: offloaded optimizer state and activations.
        disk: bytes of optimizer state on a disk.
    """

    pp_rank: int
    phase: str
    act: str
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    host: float
    disk: float

    @cached_property
    def peak(self) -> float:
        """Most bytes allocated at the same time, as torch's `max_memory_allocated` counts them."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPrediction:
    """The peaks of all pipeline ranks.

    Attributes:
        ranks: ranks in order.
        cluster: the hardware.
    """

    ranks: tuple[RankMemory, ...]
    cluster: Cluster

    @cached_property
    def worst(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def max_allocated(self) -> float:
        """The highest peak, as torch's allocator counts."""
        return self.worst.peak

    @property
    def capacity(self) -> float:
        """Bytes of a device's memory."""
        return self.cluster.gpu.memory_bytes

    @property
    def device_total(self) -> float:
        """The highest peak plus what is reserved, as `nvidia-smi` shows it."""
        return self.max_allocated + self.cluster.reserved_bytes

    @cached_property
    def host(self) -> float:
        """Most bytes of any rank in host memory."""
        return max(rank.host for rank in self.ranks)

    @cached_property
    def disk(self) -> float:
        """Most bytes of any rank on a disk."""
        return max(rank.disk for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether neither a device nor its host runs out of memory, nor a disk of room."""
        return self.shortage == 0

    @property
    def shortage(self) -> float:
        """Bytes that device, host and disk lack together; 0 if it fits."""
        missing = self.missing, self.missing_on_host, self.missing_on_disk
        return sum(max(size, 0.0) for size in missing)

    @property
    def missing(self) -> float:
        """Bytes by which the fullest device is too small; negative if it is not."""
        return self.max_allocated - self.cluster.room

    @property
    def missing_on_host(self) -> float:
        """Bytes by which a device's share of host memory is too small; negative if it is not."""
        return self.host - self.cluster.host_share

    @property
    def missing_on_disk(self) -> float:
        """Bytes by which a device's share of the disks is too small; negative if it is not."""
        return self.disk - self.cluster.disk_share


StageCache = dict[tuple[object, ...], StageBytes]
"""Bytes of stages, by their ends, their number of recomputed layers and their kinds of layers."""


def peak_memory(
    layout: Layout,
    cluster: Cluster,
    *,
    policy: StatePolicy | None = None,
    software: Software | None = None,
    known: StageCache | None = None,
) -> MemoryPrediction:
    """Predict the peak memory of each pipeline rank.

    Args:
        layout: the layout.
        cluster: the hardware.
        policy: the framework's policy for model state; None: that of Fivefold, which also sends dX
            before it computes dW if it can.
        software: the framework's habits, as far as its loss follows from them.
        known: bytes of stages, to share among layouts that differ in recompute_num_layers only.
    """
    ours, model = policy is None, layout.config.model
    fused = ours or not model.attention_dropout
    running = Running.of(layout.config, fused_attention=fused, others=not ours)
    if software is not None:
        whole, narrow = software.whole_logits, software.narrow_loss
        running = replace(running, whole_logits=whole, narrow_loss=narrow)
    policy = policy or layout_policy(layout)
    kinds: list[tuple[object, ...]] = []
    known = {} if known is None else known
    numbers = layout.config.memory.recompute_num_layers
    for place, stage in enumerate(layout.split.stages):
        ends = (stage.embedding, stage.head, stage.mtp, numbers[place % len(numbers)])
        kinds.append((*ends, *(layer_kind(model, layer) for layer in stage.layers)))
        if kinds[-1] not in known:
            known[kinds[-1]] = stage_bytes(
                layout, stage, replace(running, memory=layout.memory_of(place)), policy
            )
    sizes = [known[kind] for kind in kinds]
    states: dict[tuple[object, ...], ModelState] = {}
    early = layout.config.parallel.overlap_param_gather_with_optimizer_step
    copies = early if ours else not policy.once
    ranks = []
    splits = ours and layout.sends_dx_first
    for pp_rank, found in enumerate(moments(layout, splits_backward=splits)):
        held = tuple(kinds[stage] for stage in stages_held(layout, pp_rank))
        if held not in states:
            states[held] = model_state(layout, pp_rank, policy=policy)
        state = states[held]
        # FSDP2 frees whole gradients as it reduces them.
        gradients = state.gradients
        if ours and policy.splits_optimizer:
            gradients = min(gradients, state.updated * policy.gradient)
        updating = {"weights": state.weights if copies else state.masters, "gradients": gradients}
        ranks.append(_rank_peak(layout, pp_rank, found, state, sizes, updating))
    return MemoryPrediction(tuple(ranks), cluster)


def _rank_peak(
    layout: Layout,
    pp_rank: int,
    found: HeldMicrobatches,
    state: ModelState,
    sizes: list[StageBytes],
    updating: dict[str, float],
) -> RankMemory:
    """`updating`: bytes of weights and gradients while the optimizer updates."""
    own = [sizes[stage] for stage in stages_held(layout, pp_rank)]
    always = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer + state.update_buffers,
    }
    if state.scales:
        always["8-bit scales"] = state.scales
    start = sum(always.values())
    points = [_worst_points(running, sizes) for running in found.running]
    worst = [sum(point.size for point in each) for each in points]
    held = _held(found, own)
    host = state.host + float((found.kept @ np.array([size.moved for size in own])).max())
    # A stage gathers what it computes with; what else is gathered is there all the time.
    around = state.gathered - max(size.gathered for size in own)
    gathered = [sum(sizes[do.stage % len(sizes)].gathered for do in each) for each in found.running]
    here = np.array([sum(each) for each in zip(gathered, worst, strict=True)])
    peaks = start + around + sum(held.values()) + here[found.which]
    update = always | updating
    orthogonalising = orthogonalising_bytes(layout, layout.stages_of(pp_rank).values())
    if orthogonalising:
        update = update | {"working set": orthogonalising}
    phases = {OPTIMIZER: sum(update.values())}
    phases |= {phase: float(peaks[at].max()) for phase, at in found.phases()}
    moment = int(peaks.argmax())
    if peaks[moment] < phases[OPTIMIZER]:
        updates = "the optimizer updates"
        return RankMemory(pp_rank, OPTIMIZER, updates, update, phases, host, state.disk)
    number = int(found.which[moment])
    parts = always | {"gathered weights": around + gathered[number]}
    for name, size in held.items():
        parts[name] = parts.get(name, 0.0) + float(size[moment])
    for point in points[number]:
        here_too = {
            "gradients": point.made,
            "gathered weights" if gathered[number] else "weights": point.resharded,
            "activations": point.activations,
            "8-bit weights": point.narrow,
            "recomputed": point.recomputed,
            "loss": point.loss,
            "deferred weight gradients": point.waiting,
            "working set": point.working,
            "arriving gradients": point.gradients,
            "communication": point.communication,
        }
        parts |= {name: parts.get(name, 0) + size for name, size in here_too.items()}
    kept = {name: part for name, part in parts.items() if part}
    words = _in_words(found.running[number], points[number])
    return RankMemory(pp_rank, found.phase(moment), words, kept, phases, host, state.disk)


def _worst_points(running: Acts, sizes: list[StageBytes]) -> list[ActPoint]:
    """The point of highest memory within each of the running actions."""
    return [
        sizes[doing.stage % len(sizes)].worst(doing.kind, doing.light, doing.first, doing.last)
        for doing in running
    ]


def _held(found: HeldMicrobatches, own: list[StageBytes]) -> dict[str, NDArray[np.float64]]:
    """Bytes held since before the running action, for every moment; negative for gradients that do
    not exist yet."""
    kept, entry, loss, gradients, narrow = np.array(
        [(size.kept, size.entry, size.loss, size.gradients, size.narrow) for size in own]
    ).T
    waiting = np.array([size.waiting for size in own])
    added, more = np.array([size.with_dx for size in own]).T
    with_dx = np.minimum(found.with_dx, 1) @ added + np.maximum(found.with_dx - 1, 0) @ more
    return {
        "gradients": -(found.unmade @ gradients),
        "activations": found.kept @ kept + found.inputs @ entry,
        "loss": found.kept @ loss,
        "8-bit weights": 2 * narrow.sum() - found.only_forwards @ narrow,
        "deferred weight gradients": found.waiting @ waiting + with_dx,
    }


def _in_words(running: Acts, points: list[ActPoint]) -> str:
    words = []
    for doing, point in zip(running, points, strict=True):
        backward = doing.kind in (Kind.B, Kind.BW)
        what = f"backward at {point.where}" if backward else point.where
        words.append(f"{what} of stage {doing.stage}")
    return " and ".join(words)
