"""How a layer is run, as far as its memory and cost depend on it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

from fivefold.config.config import Config
from fivefold.config.experts import ExpertsConfig
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import TokenDispatcher
from fivefold.config.training import ELEMENT_BYTES
from fivefold.description.expert_rows import LayerRows, expected_rows, padded_rows
from fivefold.description.kinds import LayerKind

SCALE_ROWS = {"rowwise": inf, "blockwise": 128, "mxfp8": 32}
"""Rows of an operand of dW that share a scale for each feature, by recipe."""
_SCALE, _EXPONENT = 4, 1  # bytes of a scale in fp32, and of one for 32 rows, an exponent


@dataclass(frozen=True)
class Running:
    """Degrees, dtypes and memory techniques under which a layer runs on one rank.

    Attributes:
        seq_length: keys that a token can attend to; matters only for unfused attention.
        element_bytes: bytes per element of the compute dtype.
        input_bytes: bytes per element of a linear layer's kept input; fewer in fp8 or fp4.
        scale_rows: rows of it that share a scale for each feature; inf: all; 0: one scale or none.
        delayed_scales: whether scales are those of earlier steps, which no rows have, too.
        tensor_parallel: ranks that split heads, MLPs and vocabulary.
        sequence_parallel: whether these ranks split the tokens of everything else.
        expert_parallel: ranks that hold the experts of a layer, equally many each.
        expert_tensor_parallel: ranks that split each expert.
        dispatcher: token dispatcher.
        experts: settings of routers.
        routed: known rows of the layer's experts per microbatch; None: expected rows.
        fused_attention: whether attention never holds S x S scores, as is so in Fivefold.
        others: whether another framework runs it: dropout keeps a byte per value, losses more.
        whole_logits: whether every tensor-parallel rank holds the logits of the whole vocabulary.
        narrow_loss: whether an unfused loss works in the compute dtype, on tensors of its own.
        memory: settings of recomputation, offloading and fusion.
        microbatch_tokens: tokens that pass a layer at once, before sequence parallelism cuts them.
        microbatch_rows: sequences that pass a layer at once on this rank.
        latents_kept: whether attention keeps latents, not keys and values: one entry for all
            layers, or one per layer, repeated; empty: never.
        reads_chosen: whether attention to chosen tokens reads the latents of these alone.
        normed_twice: which of queries, keys and values ("qkv") are normalised without weights and
            kept beside those that attention keeps: one entry, or one per layer; empty: none.
        exchanging: number of context-parallel ranks that exchange heads (Ulysses), 1 if they do
            not: entries as above. Attention's output is then kept beside what its projection reads,
            and keys and values are repeated if there are fewer heads.
    """

    seq_length: int
    element_bytes: float = 2
    input_bytes: float = 2
    scale_rows: float = 0
    delayed_scales: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    dispatcher: TokenDispatcher = "alltoall"
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    routed: LayerRows | None = None
    fused_attention: bool = True
    others: bool = True
    whole_logits: bool = False
    narrow_loss: bool = False
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    microbatch_tokens: float = inf
    microbatch_rows: int = 1
    latents_kept: tuple[bool, ...] = ()
    reads_chosen: bool = False
    normed_twice: tuple[str, ...] = ()
    exchanging: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, *, fused_attention: bool = True, others: bool = False) -> "Running":
        """From a configuration whose tensor-parallel degrees are set."""
        training, parallel = config.training, config.parallel
        element = ELEMENT_BYTES[training.precision]
        tokens = config.rank_tokens / parallel.num_sequence_slices
        # Only layers with a softmax ask for it.
        kept = tuple(map(config.keeps_latents_by, parallel.cp_comm_type))
        return cls(
            seq_length=training.seq_length,
            element_bytes=element,
            input_bytes=0.5 if training.fp4_format else 1 if training.fp8_format else element,
            scale_rows=SCALE_ROWS.get(training.fp8_recipe, 0) if training.fp8_format else 0,
            delayed_scales=training.delays_scales,
            tensor_parallel=parallel.tensor_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            expert_parallel=parallel.expert_model_parallel_size,
            expert_tensor_parallel=parallel.expert_tensor_parallel_size,
            dispatcher=parallel.moe_token_dispatcher_type,
            experts=config.experts,
            routed=_padded(config, tokens),
            fused_attention=fused_attention,
            others=others,
            memory=config.memory,
            microbatch_tokens=tokens,
            microbatch_rows=training.micro_batch_size,
            latents_kept=kept if any(kept) else (),
            reads_chosen=config.reads_chosen,
            normed_twice=tuple(_normed_twice(config)),
            exchanging=tuple(_exchanging(config)),
        )

    def of_layer(self, layer: int) -> "Running":
        """The same for one layer, where settings differ between layers."""
        by_layer = self.latents_kept, self.normed_twice, self.exchanging
        if max(map(len, by_layer)) < 2:
            return self

        def its(layers: tuple[Any, ...]) -> tuple[Any, ...]:
            return layers and (layers[layer % len(layers)],)

        return replace(
            self,
            latents_kept=its(self.latents_kept),
            normed_twice=its(self.normed_twice),
            exchanging=its(self.exchanging),
        )

    def of_kind(self, kind: LayerKind) -> "Running":
        """The same for layers of a kind; bf16 layers keep their inputs as they are."""
        if not kind.wide or self.input_bytes == self.element_bytes:
            return self
        return replace(self, input_bytes=self.element_bytes, scale_rows=0)

    @property
    def keeps_latents(self) -> bool:
        """Whether this layer's attention keeps latents; call on the result of `of_layer`."""
        return self.latents_kept == (True,)

    @property
    def exchanging_ranks(self) -> int:
        """Number of ranks that exchange heads in this layer; call on the result of `of_layer`."""
        return self.exchanging[0] if len(self.exchanging) == 1 else 1

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Modules (Megatron's names) that the backward recomputes."""
        return self.memory.recomputed_modules

    def tiles(self, rerun_by: tuple[str, ...]) -> bool:
        """Whether an operation that these recomputed modules rerun runs in tiles of the tokens."""
        return "mlp" in rerun_by and self.memory.tiled_mlp_num_shards > 1

    @property
    def mask_bytes(self) -> float:
        """Bytes kept for each value that can be dropped."""
        return 1.0 if self.others else 0.0

    @property
    def token_parts(self) -> int:
        """Number of ranks that split the tokens outside heads, MLPs and vocabulary."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def by_heads(self, features: float) -> float:
        """Bytes per token on one rank of `features` split with the query heads."""
        return self.element_bytes * (features / self.tensor_parallel)

    def by_key_heads(self, features: float, heads: int) -> float:
        """Bytes per token on one rank of `features` split with `heads` key or value heads.

        A rank holds at least one of these heads.
        """
        return self.element_bytes * (features / min(self.tensor_parallel, heads))

    def rows(self, experts: int) -> float:
        """Rows that reach this rank's experts per token of the microbatch.

        Includes rows from the other ranks that split the same experts.
        """
        if self.routed is not None:
            return self.routed.reached / self.microbatch_tokens
        return experts / self.token_parts * self.expert_tensor_parallel

    def rows_of_one(self, experts: int) -> float:
        """Rows per token of the microbatch that this rank's share of the experts amounts to."""
        return self.rows(experts) / self.expert_tensor_parallel

    def narrows(self, *unless: str) -> bool:
        """Whether a linear keeps its input in 8 bits: not if a module of `unless` is recomputed."""
        return self.input_bytes < self.element_bytes and not {*unless} & {*self.recomputed}

    def input_size(self, *unless: str) -> float:
        """Bytes per element that it keeps of its input; arguments as in `narrows`."""
        return self.input_bytes if self.narrows(*unless) else self.element_bytes

    @property
    def pads_rows(self) -> bool:
        """Whether the rows of every expert are padded to its capacity."""
        pads = self.experts.moe_pad_expert_input_to_capacity
        return pads and self.experts.moe_expert_capacity_factor is not None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that together hold the experts of a layer."""
        return self.expert_parallel * self.expert_tensor_parallel

    @property
    def score_bytes(self) -> float:
        """Bytes per score, and per weight of a row."""
        return max(self.router_bytes, 4)

    @property
    def router_bytes(self) -> float:
        """Bytes per element in the router's matrix product."""
        named = self.experts.moe_router_dtype
        return max(ELEMENT_BYTES[named], self.element_bytes) if named else self.element_bytes

    def by_microbatch(self, size: float) -> float:
        """Bytes per token of a tensor with `size` bytes per microbatch."""
        return size / self.microbatch_tokens


def gradient_bytes(running: Running) -> float:
    """Bytes per element of the gradient of a linear layer's output that its weight gradient reads;
    in fp8 those that dX has read, where one scale serves both."""
    serves_both = running.input_bytes == 1 and not running.scale_rows and not running.others
    return 1 if serves_both else running.element_bytes


def row_parts(running: Running) -> int:
    """Number of ranks that split the tokens of a row, where a microbatch is known."""
    if running.microbatch_tokens == inf:
        return 1
    return round(running.microbatch_rows * running.seq_length / running.microbatch_tokens)


def share_at_once(running: Running, rerun_by: tuple[str, ...]) -> float:
    """Share of the tokens that an operation works on at a time: a tile's, in a tiled MLP.

    Args:
        running: how the operation's layer runs.
        rerun_by: recomputed modules that rerun the operation.
    """
    if not running.tiles(rerun_by) or running.microbatch_tokens == inf:
        return 1.0
    tokens = int(running.microbatch_tokens) // running.token_parts
    return running.memory.tile_of(tokens) / tokens


def layer_rows(running: Running, model: ModelConfig) -> LayerRows:
    """Rows of a layer with experts per token of the microbatch."""
    if running.routed is not None:
        return running.routed.times(1 / running.microbatch_tokens)
    ep, etp = running.expert_parallel, running.expert_tensor_parallel
    expected = expected_rows(running.dispatcher, model, ep=ep, etp=etp)
    return expected.times(1 / running.token_parts)


def at_place(running: Running, place: int) -> Running:
    """The same for the layer at this place in its stage, as `MemoryConfig.of_layer` has it."""
    memory = running.memory.of_layer(place)
    return running if memory is running.memory else replace(running, memory=memory)


def scale_bytes(running: Running, features: float, rows: float | None = None) -> float:
    """Bytes per token of the scales of an 8-bit input with `features` on this rank.

    Scales cover the whole input of a product, where ranks split its tokens before it, too.

    Args:
        running: how the layer runs.
        features: features of the input.
        rows: its rows in a microbatch; None: one for each token.
    """
    rows = running.microbatch_tokens if rows is None else rows
    if running.input_bytes >= running.element_bytes or not (rows or running.delayed_scales):
        return 0.0
    blocks = 1.0
    if running.scale_rows:
        blocks = features * max(ceil(rows / running.scale_rows), 1)
    size = _EXPONENT if running.scale_rows == SCALE_ROWS["mxfp8"] else _SCALE
    return running.by_microbatch(size * blocks)


def _normed_twice(config: Config) -> Iterator[str]:
    """The tensors that each layer keeps twice because of norms, depending on the exchange of heads
    and offloading."""
    model, parallel = config.model, config.parallel
    if not (model.qk_l2_norm or model.v_l2_norm):
        return
    token = config.rank_tokens * ELEMENT_BYTES[config.training.precision]
    moves, ranks = "core_attn" in config.memory.moved_items, _exchanging(config) or [1]
    tp = parallel.tensor_model_parallel_size
    for layer in range(model.num_layers):
        own = model.as_in(layer)
        keys = own.kv_heads_of(tp)
        sizes = {"q": own.q_size / tp, "k": keys * own.query_dim, "v": keys * own.value_dim}
        normed = "qk" * (model.qk_l2_norm and model.rotates(layer)) + "v" * model.v_l2_norm
        if ranks[layer % len(ranks)] == 1:
            least = config.memory.min_offloaded_tensor_size if moves else inf
            normed = "".join(name for name in normed if token * sizes[name] >= least)
        yield normed if model.is_softmax(layer) else ""


def _exchanging(config: Config) -> list[int]:
    """Context-parallel ranks that exchange heads, by layer; empty: none do."""
    parallel = config.parallel
    inner = parallel.hierarchical_context_parallel_sizes
    sizes = {"a2a": parallel.context_parallel_size, "a2a+p2p": inner[0] if inner else 1}
    ranks = [sizes.get(kind, 1) for kind in parallel.cp_comm_type]
    return ranks if max(ranks) > 1 else []


def _padded(config: Config, tokens: float) -> LayerRows | None:
    parallel = config.parallel
    if config.model.num_experts is None:
        return None
    return padded_rows(
        parallel.moe_token_dispatcher_type,
        config.experts,
        config.model,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        tokens=int(tokens / parallel.token_parts),
    )
