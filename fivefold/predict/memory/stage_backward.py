"""Gradients and copies of weights while a backward passes the blocks of a stage, one by one.

FSDP2 gathers and reduces a block's parameters together: a layer without its experts, these experts,
the ends of a stage. When the gradients of a block are there, it frees the copies of its weights, if
none needs them any longer in the step, copies the gradients into a message and frees them, and the
message when it reduces the next block. Sizes are bytes on one device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.blocks import GatheredBlock, layer_block, stage_blocks
from fivefold.counts.policy import StatePolicy
from fivefold.counts.shards import ShardPlace, num_expert_shards, num_shards
from fivefold.counts.state import fetched_shard_bytes, gathered_bytes, kept_reduced, with_replicas
from fivefold.description.shape import StageParts, all_layers
from fivefold.layout import Layout


class Change(NamedTuple):
    """What a backward has changed, as the attributes of `ActPoint` of these names say."""

    gradients: float
    made: float
    resharded: float


@dataclass(frozen=True)
class StageBackward:
    """A backward through the blocks of a stage.

    Attributes:
        layout: layout of the stage.
        policy: Fivefold's policy for model state.
        reduces: whether it reduces gradients.
        first: whether the step has made no gradients of the stage before.
        last: whether the step makes none of them afterwards.
        deferred: whether it makes gradients that were deferred, which autograd does not add.
    """

    layout: Layout
    policy: StatePolicy
    reduces: bool
    first: bool
    last: bool
    deferred: bool

    @cached_property
    def _first(self) -> ShardPlace:
        """The first of the ranks that share the optimizer state."""
        return ShardPlace.first(self.layout)

    @property
    def anew(self) -> bool:
        """Whether it makes the first gradients of a stage whose gradients each step makes anew."""
        return self.first and self.policy.frees_gradients

    @property
    def fresh(self) -> float:
        """Bytes of a new gradient of a linear layer, and of the wider one that a rank alone keeps;
        0 if it is made in the sum, or added to it."""
        layout, policy = self.layout, self.policy
        adds = policy.frees_gradients and not (policy.splits_gradient or self.first)
        adds = adds and layout.owns_linears and layout.fuses_accumulation
        if adds or policy.in_place:
            return 0.0
        widens = self.anew and not policy.copy
        widened = policy.gradient * (policy.gradient != policy.fresh) if widens else policy.widened
        return policy.fresh + (widened if widens or not self.deferred else 0.0)

    @property
    def sent(self) -> float:
        """Bytes of the copy in which replicas' sum of a gradient travels while the step's last
        backward runs."""
        overlaps = self.layout.config.parallel.overlap_grad_reduce
        return self.policy.sent * (self.last and overlaps)

    def tied(self, stage: StageParts) -> float:
        """Bytes of an element of the gradient of an output layer that is the embedding of the same
        stage, in the type in which the parameter takes it; 0: there is none."""
        both = stage.head and stage.embedding and not self.deferred
        if self.layout.config.model.untie_embeddings_and_output_weights or not both:
            return 0.0
        each = self.fresh if self.policy.reduces else self.policy.gradient
        return each * bool(self.fresh)

    @property
    def _message(self) -> float:
        """Bytes of a gradient in a message."""
        policy = self.policy
        return policy.reducing - policy.fresh if policy.reducing else policy.gradient

    def end_of(self, block: GatheredBlock, *done: GatheredBlock) -> Change:
        """The change when all gradients of a block exist, and those of the blocks `done` before are
        reduced."""
        policy, size = self.policy, block.size
        made, resharded = self._made(done), self._resharded(done)
        if not self.reduces:
            new = size * self.fresh
            if self.anew:  # FSDP2 converts them one by one
                new = block.converted(policy.fresh, policy.gradient)
            elif self.first:
                new = max(new, policy.gradient * block.made_anew(policy))
            return Change(new, made, resharded)
        shard = self._first.held(block)
        back = policy.gradient * self._first.largest(block) * self._comes_back(block)
        # One after the other.
        passing = max(policy.gradient * self._divided(block), self._narrowed(size, shard), back)
        wide = policy.gradient * shard + passing
        if shard < block.size:  # a loop variable in FSDP2's reduction keeps the last one alive
            wide += (policy.fresh if policy.splits_gradient else policy.gradient) * block.last
        # So does one of the gradients that it rearranges first.
        last = sum(self._first.rearranged(block)[-1:])
        if policy.splits_gradient:
            sent = size * self._message + max((size + last) * policy.fresh, wide)
        else:  # what has been copied into the message is free
            copied = max(last * policy.gradient, wide - size * policy.gradient, 0.0)
            sent = size * self._message + copied
            made += size * policy.gradient * (self.anew and not policy.splits_optimizer)
        reduced = Change(sent, made, self._resharded((*done, block)))
        return max(Change(size * self.fresh, made, resharded), reduced, key=sum)

    def _comes_back(self, block: GatheredBlock) -> bool:
        """Whether the host's sum of a block's gradients is copied back to be added to."""
        again = self.policy.splits_gradient and not self.first
        return again and self.policy.offloaded > 0 and not with_replicas(self.layout, block).size

    def _divided(self, block: GatheredBlock) -> int:
        """Number of gradients of a block that FSDP2 divides by one into a copy, in groups of one
        rank."""
        grid = self.layout.grid
        replicas, shards = grid.dp * grid.cp, num_shards(self.layout)
        if not block.dense:
            replicas, shards = grid.edp, num_expert_shards(self.layout)
        return block.size if shards == 1 < replicas else 0

    def _narrowed(self, size: int, shard: int) -> float:
        """Bytes of a message of so many gradients in a narrower type, in which it is sent, and of
        what comes of it, in that type or summed in a wider one."""
        config = self.layout.config
        each, kept, parallel = config.sent_gradient_bytes, self.policy.gradient, config.parallel
        if parallel.zero_quantized_gradients or shard == size:
            return 0.0
        sent = each * size * (each != kept)
        if parallel.ddp_reduce_scatter_with_fp32_accumulation:  # sums are formed in this buffer
            wide = ELEMENT_BYTES["fp32"]
            return sent + each * size + wide * shard * (wide > kept)
        return sent + each * shard * (each != kept)

    def after(self, sent: GatheredBlock, *done: GatheredBlock) -> Change:
        """The change while a backward computes after blocks are `done`, the last reduction being
        that of `sent`."""
        message = sent.size * self._message if self.reduces else 0.0
        return Change(message, self._made(done), self._resharded(done))

    def _made(self, done: tuple[GatheredBlock, ...]) -> float:
        """Bytes of gradients that the backward has added; negative if there are fewer."""
        policy = self.policy
        if policy.splits_gradient:
            return self._reduced(done) if self.first else 0.0
        if not policy.frees_gradients:
            anew = self.first * policy.gradient
            each = (self.sent * block.size + anew * block.made_anew(policy) for block in done)
            return sum(block.count * size for block, size in zip(done, each, strict=True))
        whole = now = policy.gradient * sum(block.count * block.size for block in done)
        if self.reduces and policy.splits_optimizer:
            now = self._reduced(done)
        return now if self.first else now - whole

    def _reduced(self, done: tuple[GatheredBlock, ...]) -> float:
        """Bytes of those of them that have been reduced."""
        return sum(block.count * kept_reduced(self.layout, block, self.policy) for block in done)

    def _resharded(self, done: tuple[GatheredBlock, ...]) -> float:
        """Bytes (negative) of permanent copies of weights that the step no longer needs."""
        if self.policy.splits_copy or not (self.reduces and self.last):
            return 0.0
        return -sum(block.count * block.copied(self.policy) for block in done)


@dataclass(frozen=True)
class Copies:
    """Bytes of gathered weights during a backward through a layer of a stage.

    Attributes:
        ends: bytes of the stage's ends.
        experts, rest: bytes of the layer's experts, and of all else in it.
        beside: bytes of what is gathered beside it: the layer before, without separate experts.
        message: bytes of the message of what is gathered last in a layer, which is copied; 0
            where a rank gathers from itself. In a forward it stays until the next one.
        passed: bytes of the message before it, which stays in a forward until that one is copied.
        rearranged: bytes of copies of it while parameters are put together that are not cut
            along their first dims.
        visiting: bytes of a shard that is on the device only while a block is gathered.
        most: most that are gathered at once; 0 if the blocks do not come and go.
        unpacked: bytes of the layers' largest block while it is unpacked from a narrower message,
            with its copy.
        ends_unpacked: the same of the ends, which are gathered before any layer.
    """

    ends: float = 0.0
    experts: float = 0.0
    rest: float = 0.0
    beside: float = 0.0
    message: float = 0.0
    passed: float = 0.0
    rearranged: float = 0.0
    visiting: float = 0.0
    most: float = 0.0
    unpacked: float = 0.0
    ends_unpacked: float = 0.0

    @classmethod
    def of(cls, layout: Layout, stage: StageParts, policy: StatePolicy, place: int) -> "Copies":
        """The gathered weights in the layer at this place of a stage; -1: it has no layers."""
        if not policy.splits_copy:
            return cls()
        ends, *layers = stage_blocks(layout, stage, whole_embedding=policy.whole_embedding)
        sizes = (part.size for block in layers for part in block.parts(policy))
        unpacked = policy.unpacking * max(sizes, default=0)
        ends_unpacked = policy.unpacking * ends.size
        by_program = layout.config.parallel.pipeline_max_unsharded_stages is not None
        if by_program or layout.alternates_within_stages:
            return cls(unpacked=unpacked, ends_unpacked=ends_unpacked)
        model, several = layout.config.model, num_shards(layout) > 1
        numbers = [
            layer
            for layer in all_layers(model, stage)[: place + 1]
            if layer < model.num_layers or model.starts_prediction(layer)
        ]
        several_experts = num_expert_shards(layout) > 1
        experts, rest, before, copied, passed = 0.0, 0.0, 0.0, 0.0, several * ends.copied(policy)
        if numbers:
            parts = _parts(layout, numbers[-1], policy)
            experts, rest = (part.copied(policy) for part in parts)
            own = parts[0 if experts else 1]
            copied = policy.copy * sum(ShardPlace.first(layout).rearranged(own))
        message = several * rest
        if experts:
            message, passed = several_experts * experts, message
        if len(numbers) > 1:
            apart, others = (part.copied(policy) for part in _parts(layout, numbers[-2], policy))
            before = others if policy.in_flight > 1 and several else 0.0
            if not experts:
                passed = several_experts * apart if apart else several * others
        return cls(
            ends=ends.copied(policy),
            experts=experts,
            rest=rest,
            beside=before,
            message=message,
            passed=passed,
            rearranged=copied,
            visiting=fetched_shard_bytes(layout, stage, policy),
            most=gathered_bytes(layout, stage, policy),
            unpacked=unpacked,
            ends_unpacked=ends_unpacked,
        )

    def but(self, *names: str) -> float:
        """Bytes (negative) by which the gathered weights are below `most` when only these exist."""
        return sum(getattr(self, name) for name in names) - self.most if self.most else 0.0


def _parts(layout: Layout, layer: int, policy: StatePolicy) -> tuple[GatheredBlock, GatheredBlock]:
    return layer_block(layout, layer).parts(policy)
