"""Properties of frameworks that no setting describes: those of Fivefold and of others."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from fivefold.predict.cluster import Cluster

Attention = Literal["best", "listed", "flash2", "flash1", "scores"]
Dispatcher = Literal["alltoall", "deepep", "hybridep"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
Module = Literal["attn", "mamba", "moe_router", "moe_preprocess"]
MODULES: tuple[Module, ...] = get_args(Module)
"""Modules of layers, of which each may be a CUDA graph (Megatron's names); those of a layer with
experts are one together."""


@dataclass(frozen=True)
class Software:
    """Properties of a framework that Fivefold's settings do not describe.

    Attributes:
        fused: whether norms, residuals, activations and the loss are one kernel each; otherwise
            each elementwise operation reads and writes memory separately.
        casts_norms: whether a norm reads a copy of the hidden states in fp32 that a kernel of its
            own makes.
        attention: the attention kernel: the best one, FlashAttention-2, PyTorch's list that puts
            the best one before it on Blackwell only ("listed"), the first FlashAttention, or an
            unfused one, which holds the matrix of scores in memory if attention has dropout.
        overlaps_backward_tp: whether the backward of column-parallel layers gathers X again in
            parallel to dX, and reduces dX in parallel to dW; otherwise X is kept whole, and the
            reduction is exposed.
        hidden_tp: share of a tensor-parallel collective that `tp_comm_overlap` can hide beside its
            multiplication; None: as in Fivefold, in a part for each rank.
        eager_dx: whether the gradient of a stage's input is sent before those of its weights are
            computed; None: as in the layout (`Layout.sends_dx_first`).
        gradient_bytes: bytes of a gradient element on the wire; None: as in the settings.
        reduces_once: whether, with a pipeline, parameters are gathered and gradients reduced once a
            step for every sharding strategy; Fivefold does it in each microbatch under ZeRO-2 and
            ZeRO-3.
        joins_linears: whether queries, keys and values are computed in one multiplication, and so
            are the two projections of a gated MLP.
        keeps_every_second: whether selective recomputation keeps the results of attention and of
            every second multiplication, and recomputes everything else (torchtitan's "op").
        by_tensor: whether each parameter is gathered, reduced and updated separately; otherwise the
            parameters of a layer are handled together.
        gathers_to_recompute: whether sharded parameters are gathered for the forward, for its
            recomputation, and for the backward: four passes of parameters and gradients over the
            network (ZeRO-Infinity, Rajbhandari et al., 2021, section 4); otherwise parameters
            gathered for the recomputation are kept for the backward.
        reduces_whole: whether gradients of a sharded optimizer are summed on every rank, which
            keeps its share: twice the bytes of a reduce-scatter (`allreduce_and_scatter` in
            DeepSpeed's ZeRO-1 and ZeRO-2).
        bucket: elements of gradients, of a sharded optimizer, that are copied together, divided by
            the number of ranks, summed and copied back; None: they are summed where they are, layer
            by layer.
        broadcasts_updates: whether a rank updates whole parameters and broadcasts them in its
            sharding group, where others gather shards: as many messages one after the other as
            there are parameters or ranks, each of which visits every rank (InternLM's ZeRO-1).
        whole_embedding: whether every tensor-parallel rank holds the whole token embedding, which
            then needs no sum, but a gather of its gradient.
        whole_logits: whether tensor-parallel ranks gather the logits of the whole vocabulary, and
            each computes the whole loss.
        narrow_loss: whether an unfused loss works on logits in the compute dtype, as
            `F.cross_entropy` does where nobody widens them; otherwise in fp32.
        gathers_each: whether each column-parallel projection gathers its own X and reduces its own
            dX, where others do so once for all that read it; a compiler joins equal gathers.
        reduces_last: whether, without a pipeline, sharded gradients are summed whole over
            microbatches and reduced beside the last backward only (`set_requires_gradient_sync`
            of FSDP2).
        waits_for_ends: whether the embedding and the output layer are sharded as one block, which
            is gathered before anything computes and reduced when everything has (PyTorch's FSDP
            around a model).
        accumulates_apart: which weight gradients kernels of their own add to those of earlier
            microbatches, where the multiplications that compute others do: "never" any, "always"
            all, or those of "grouped" products and of 8 and 4 bits, which PyTorch's do not add.
        gathers_by_block: whether parameters that are gathered once a step travel beside the forward
            of the block before, so that each stage of a pipeline adds what it does not hide to the
            way of the first microbatch; otherwise they travel from the start of the step on, while
            stages wait.
        gather_rate: bytes/s at which parameters are gathered and gradients reduced, whatever the
            links; the gathers of the forward are then exposed. None: as the links allow.
        waits_for_hops: whether a stage is idle while a message to or from it travels: "never",
            "always", or in a schedule with one stage a rank only ("plain").
        scatters_hops: whether tensor-parallel ranks that hold the same activations send a share
            each to the next pipeline rank's node, where the shares are gathered (Narayanan et al.,
            2021, section 4.1).
        whole_graph: whether a step is one CUDA graph, so that the GPU never waits for the host.
        graphed: modules of a layer that are a CUDA graph together, which the host launches in one
            operation.
        dispatcher: what exchanges tokens where experts are products of their own each: PyTorch's
            all-to-all, or kernels of DeepEP or HybridEP, which permute, too.
        blocks_launches: whether the host waits for each kernel that it launches
            (`CUDA_LAUNCH_BLOCKING=1`), so that its time and the GPU's add up.
        loops_experts: whether a rank's experts are products and kernels of their own each, and not
            of one grouped product.
        state_kernels: whether linear attention's delta rule is a few kernels in 16 bits
            (flash-linear-attention), where PyTorch's products compute it in fp32 otherwise.
        imbalance: tokens of the busiest rank's experts, relative to an even share.
    """

    fused: bool = True
    casts_norms: bool = False
    attention: Attention = "best"
    overlaps_backward_tp: bool = True
    hidden_tp: float | None = None
    eager_dx: bool | None = None
    gradient_bytes: float | None = None
    reduces_once: bool = False
    joins_linears: bool = True
    keeps_every_second: bool = False
    by_tensor: bool = False
    gathers_to_recompute: bool = False
    reduces_whole: bool = False
    bucket: int | None = None
    broadcasts_updates: bool = False
    whole_embedding: bool = False
    whole_logits: bool = False
    narrow_loss: bool = False
    gathers_each: bool = False
    reduces_last: bool = False
    waits_for_ends: bool = False
    accumulates_apart: Literal["never", "grouped", "always"] = "grouped"
    gathers_by_block: bool = False
    gather_rate: float | None = None
    waits_for_hops: Literal["never", "plain", "always"] = "never"
    scatters_hops: bool = False
    whole_graph: bool = False
    graphed: frozenset[Module] = frozenset()
    dispatcher: Dispatcher = "alltoall"
    blocks_launches: bool = False
    loops_experts: bool = False
    state_kernels: bool = False
    imbalance: float = 1.0

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with the attention rate of this software's kernel."""
        gpu = cluster.gpu
        listed = 1.0 if gpu.peak.fp4 else gpu.flash2
        shares = {"flash1": gpu.flash1, "flash2": gpu.flash2, "listed": listed}
        share = shares.get(self.attention, 1.0)
        if share == 1.0:
            return cluster
        slower = replace(
            gpu,
            attention_forward=gpu.attention_forward * share,
            attention_backward=gpu.attention_backward * share,
        )
        return replace(cluster, gpu=slower)
