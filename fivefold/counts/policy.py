"""Bytes per parameter that frameworks keep, and which of them data-parallel ranks share."""

from dataclasses import dataclass, replace

from fivefold.config.config import Config
from fivefold.config.training import BLOCK, ELEMENT_BYTES
from fivefold.data_parallel.blocks import UNPACKING, reduction_buffers
from fivefold.description.shape import count_parameters, is_layer_matrix, stage_weights
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import keeps_weights, weight_bytes


@dataclass(frozen=True)
class StatePolicy:
    """Bytes per parameter that a framework keeps, and which of them data-parallel ranks shard.

    Attributes:
        copy: bytes of the compute-dtype copy of a weight; 0 if the master itself is used.
        gradient: bytes of the accumulated gradient.
        master: bytes of the weight that the optimizer updates.
        moments: bytes of all optimizer moments together, of matrices whose rows are whole blocks,
            and of what a weight lacks of its master.
        splits_copy: whether copies exist only while their block computes (ZeRO-3).
        splits_gradient: whether gradients are reduced to shards in every microbatch (ZeRO-2, 3).
        splits_optimizer: whether master and moments are sharded (ZeRO-1, 2, 3).
        fresh: bytes of a weight's gradient before it is accumulated; 0 if the matrix multiplication
            accumulates directly.
        widened: bytes of a copy of that, as wide as the sum, which autograd makes to add it.
        fresh_at_once: whether a stage's backward is one compiled graph, which returns the gradients
            of all its weights at its end.
        sent: bytes of a replicated gradient's copy that is sent; 0 if it is sent itself.
        in_place: whether products make gradients of weights where they are kept.
        placeholder: bytes of the empty gradient kept for each distinct weight of a layer.
        reducing: bytes of a layer's gradients in reduction while the next layer computes.
        reduces_whole: whether ranks that share nothing reduce a block's gradients in a message of
            their own. The block's copy in the compute dtype is free by then.
        in_flight: number of layers whose copies are held at once if copies are sharded: the one
            that computes and those being gathered. Both ends of a stage are held while it runs.
        experts_apart: whether experts are gathered and reduced apart from the rest of their layer.
        whole_embedding: whether every tensor-parallel rank holds the whole token embedding.
        compute: bytes of a weight in the compute dtype.
        narrow_copy: like `copy`, of a weight that 8-bit linear layers multiply with.
        unpacking: bytes of a layer's weights while they are made from a narrower message.
        offloaded: share of the parameters whose master and moments are in host memory, to which
            gradients leave when they are reduced; the device keeps them in the compute dtype.
        updates_on_device: whether these are copied to the device for each update, by buckets.
        masters_apart: whether the moments include masters of weights in the compute dtype.
        rounded: number of moments that are rounded stochastically after each update; and weights.
        wide: bytes of a moment that is not rounded.
        eight_bit: number of moments that are kept in 8 bits, with scales of blocks.
        on_disk: whether these masters and moments lie on a disk instead.
        offloads_weights: whether the weights of these parameters are on the device for their
            gathers only.
        weights_on_disk: whether such weights lie on a disk, not in host memory.
        frees_gradients: whether gradients on the device are freed after each step, so that there
            are none before the first backward.
        frees_experts: whether those of experts are even where others are not, which stay in the
            messages of replicas: experts may have none.
        step_weight: bytes of a weight that 8-bit linear layers keep for the microbatches of a step,
            once for the results and once for the gradients of inputs; 0 if they do not.
        muon: whether only what is no matrix of a layer has a second moment, which `moments` leaves
            out.
        once: whether the only backward of a step ends copies that are not permanent in its course.
        frees_message: whether a forward frees the message of its last gather before the loss.
    """

    copy: float
    narrow_copy: float
    gradient: float
    master: float
    moments: float
    splits_copy: bool = False
    splits_gradient: bool = False
    splits_optimizer: bool = False
    fresh: float = 0.0
    widened: float = 0.0
    fresh_at_once: bool = False
    sent: float = 0.0
    in_place: bool = False
    placeholder: float = 0.0
    reducing: float = 0.0
    reduces_whole: bool = False
    in_flight: int = 2
    experts_apart: bool = False
    whole_embedding: bool = False
    compute: float = 2.0
    unpacking: float = 0.0
    offloaded: float = 0.0
    updates_on_device: bool = False
    masters_apart: bool = False
    rounded: int = 0
    wide: float = 4.0
    eight_bit: int = 0
    on_disk: bool = False
    offloads_weights: bool = False
    weights_on_disk: bool = False
    frees_gradients: bool = False
    frees_experts: bool = False
    step_weight: float = 0.0
    muon: bool = False
    once: bool = False
    frees_message: bool = False

    @property
    def reduces(self) -> bool:
        """Whether gradients pass through messages of their own."""
        return bool(self.reducing) or self.reduces_whole

    def masters(self, here: float, off_device: float, frozen: float) -> float:
        """Bytes of weights on the device: of `here` trained parameters with state on the device,
        `off_device` with state off the device (perhaps narrower), and `frozen` ones."""
        return (
            here * self.master
            + (frozen + (0 if self.offloads_weights else off_device)) * self.compute
        )


def engine_policy(config: Config, *, alone: bool = False) -> StatePolicy:
    """Fivefold's policy: masters in at least fp32, copies in the compute dtype.

    `alone`: whether no rank sums gradients with others, so that each step makes these anew.
    """
    sharding, precision = config.parallel.sharding, config.training.precision
    memory = config.memory
    compute, optimizer = ELEMENT_BYTES[precision], config.optimizer
    wide = config.master_bytes
    master = compute if config.narrow_weights else wide
    gradient = config.gradient_bytes
    shared = sharding.splits_optimizer
    offloaded = memory.optimizer_offload_fraction if memory.optimizer_off_device else 0.0
    types, muon = optimizer.moment_types, optimizer.optimizer == "muon"
    each = {"fp32": wide, "bf16": 2, "fp8": 1 + 1 / BLOCK}
    copy = compute if shared or compute != master else 0
    return StatePolicy(
        copy=copy,
        narrow_copy=1 if config.training.fp8_param_gather and shared else copy,
        gradient=gradient,
        master=master,
        moments=sum(each[kind] for kind in types[: 2 - muon])
        + 2 * optimizer.store_param_remainders
        + wide * config.keeps_masters_apart,
        splits_copy=sharding.splits_parameters,
        splits_gradient=sharding.splits_gradients,
        splits_optimizer=shared,
        fresh=compute,
        reducing=(compute + gradient if shared else 0) + reduction_buffers(config.parallel),
        reduces_whole=not shared and compute != master,
        in_flight=1 + config.parallel.overlap_param_gather,
        experts_apart=True,
        frees_message=True,
        compute=compute,
        unpacking=config.parallel.zero_quantized_weights * UNPACKING,
        offloaded=offloaded,
        updates_on_device=memory.offload_optimizer_states,
        masters_apart=config.keeps_masters_apart,
        rounded=sum(kind != "fp32" for kind in types) + optimizer.narrow_parameters,
        wide=wide,
        eight_bit=types.count("fp8"),
        on_disk=memory.optimizer_offload_path is not None,
        offloads_weights=memory.param_cpu_offload,
        weights_on_disk=memory.param_offload_path is not None,
        muon=muon,
        frees_gradients=(copy > 0 or alone) and not (offloaded and sharding.splits_gradients),
    )


def layout_policy(layout: Layout) -> StatePolicy:
    """Fivefold's policy for a layout, which with one backward in a step needs less.

    FSDP2 frees gradients after each step. ZeRO-1 then reduces each block at once, as ZeRO-2 does,
    and no whole gradients are kept. Replicated ranks' are made in their messages, unless autograd
    adds them, which first makes of those in bf16 others as wide as their sum. So it does on a rank
    alone, which makes its sums anew, too.
    """
    config, alone = layout.config, layout.grid.dp * layout.grid.cp == 1
    policy = engine_policy(config, alone=alone)
    backwards = layout.num_microbatches * config.parallel.num_sequence_slices
    if not policy.copy:
        by_products = layout.owns_linears and (layout.fuses_accumulation or backwards == 1)
        wide = policy.gradient * (policy.gradient != policy.fresh)
        wire = ELEMENT_BYTES["bf16"] if config.parallel.grad_reduce_in_bf16 else policy.gradient
        policy = replace(
            policy,
            fresh=policy.fresh + wide * (not alone),
            widened=wide * (alone and backwards > 1 and not by_products),
            in_place=by_products and layout.fills_messages,
            frees_experts=layout.grid.edp == 1,
            sent=0 if alone else wire * (wire != policy.gradient),
        )
    if keeps_weights(config, backwards):
        policy = replace(policy, step_weight=weight_bytes(config.training.fp8_recipe))
    return alone_in_step(config, policy) if backwards == 1 else policy


def alone_in_step(config: Config, policy: StatePolicy) -> StatePolicy:
    """The policy for a step with one backward, unless its gradients wait or stay in messages."""
    if not policy.copy or not (policy.splits_gradient or config.parallel.overlap_grad_reduce):
        return policy
    leaves = policy.offloaded and policy.splits_optimizer  # gradients leave as they are reduced
    frees = policy.frees_gradients and not leaves
    return replace(
        policy, once=True, splits_gradient=policy.splits_optimizer, frees_gradients=frees
    )


def saved_bytes(config: Config) -> float:
    """Bytes of a checkpoint per trained parameter: the master weight and both moments of AdamW, or
    for a matrix the one of Muon."""
    policy = engine_policy(config)
    return policy.master * (not policy.masters_apart) + policy.moments


def checkpoint_bytes(config: Config) -> float:
    """Bytes of a checkpoint; frozen weights are kept as they compute."""
    model, policy = config.model, engine_policy(config)
    whole = count_parameters(model).total
    frozen = 0 if model.trains_all else count_parameters(model.base).total
    weights = stage_weights(model).items() if policy.muon else ()
    others = sum(w.size for name, w in weights if w.trained and not is_layer_matrix(name, w))
    return (whole - frozen) * saved_bytes(config) + others * policy.wide + frozen * policy.compute


def megatron_policy(splits_optimizer: bool) -> StatePolicy:
    """Megatron-LM's policy in bf16: matrix multiplications accumulate gradients in fp32.

    Autograd then receives an empty gradient: a new one each time for the output layer, and one kept
    per shape by Transformer Engine for the layers' weights.
    """
    return StatePolicy(
        copy=2,
        narrow_copy=2,
        gradient=4,
        master=4,
        moments=8,
        splits_optimizer=splits_optimizer,
        fresh=2,
        placeholder=2,
    )
