"""Theoretical bytes that a rank sends in one training step, in closed form; torch-free."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.context import seen_shares
from fivefold.counts.expert_volumes import expert_flows
from fivefold.counts.lengths import summed_lengths
from fivefold.counts.messages import Flow, context_volumes, wire_bytes
from fivefold.counts.parameters import parameter_records, tied_ranks
from fivefold.counts.recompute import recomputed_layers
from fivefold.counts.routed import StepRows
from fivefold.counts.sharded import ShardedVolumes
from fivefold.counts.shards import ShardPlace
from fivefold.description.core_attention import CoreAttention
from fivefold.description.layers import Layer, describe_layer
from fivefold.description.linear_attention import Recurrence
from fivefold.description.operations import Operation
from fivefold.description.running import Running, at_place
from fivefold.description.shape import all_layers, placed_layers, whole_model
from fivefold.description.sparse import SparseAttention
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import num_delayed_scales
from fivefold.pipeline.schedules.registry import with_copies

SCALAR_BYTES = 8  # token counts are int64, losses and squared norms fp64


def step_volumes(layout: Layout, rank: int, rows: StepRows | None = None) -> tuple[Flow, ...]:
    """Everything that a rank sends in one training step, including the optimizer.

    Args:
        layout: layout of the run.
        rank: rank that sends.
        rows: rows of each layer with experts; None: expected rows with evenly used experts.
    """
    volumes, sharded = _Volumes(layout, rank), ShardedVolumes(layout, rank)
    flows = (
        *sharded.dense(),
        *volumes.tensor_parallel(),
        *volumes.context_parallel(),
        *sharded.experts(),
        *sharded.orthogonalised(),
        *expert_flows(layout, rank, rows),
        *volumes.pipeline(),
        *volumes.scalars(),
    )
    return tuple(flow for flow in flows if flow.size)


def by_axis(flows: tuple[Flow, ...]) -> dict[str, float]:
    """Total bytes by axis."""
    total: defaultdict[str, float] = defaultdict(float)
    for flow in flows:
        total[flow.axis] += flow.size
    return dict(total)


class _Volumes:
    """The formulas for one rank, and the numbers that they share."""

    def __init__(self, layout: Layout, rank: int) -> None:
        config, grid = layout.config, layout.grid
        self.layout, self.model, self.parallel = layout, config.model, config.parallel
        self.rank, self.at = rank, grid.coordinates(rank)
        # Each copy of the model takes its share of the microbatches.
        self.tp, self.microbatches = grid.tp, layout.num_microbatches // layout.num_copies
        self.slices = self.parallel.num_sequence_slices
        self.data = grid.dp * grid.cp
        self.place = ShardPlace.of(layout, rank)
        self.element = ELEMENT_BYTES[config.training.precision]
        self.running = Running.of(config)
        self.master, self.gradient = config.master_bytes, config.gradient_bytes
        self.tokens = config.rank_tokens
        self.stages = layout.stages_of(self.at["pp"])
        self.recomputed = layout.recomputed()
        self.records = parameter_records(layout, rank)

    def tensor_parallel(self) -> Iterator[Flow]:
        """Tensor-parallel bytes, per microbatch and hidden state of N bytes, in (t-1)/t N.

        Attention, an MLP and shared experts: 2 all-reduces each = 4; with sequence parallelism an
        all-gather and a reduce-scatter forward, the same backward and one more gather of the saved
        input = 5. The embedding: 2. The output layer: an all-reduce = 2, or 2 gathers and a
        reduce-scatter = 3. The loss gathers 2 numbers per token (3 with label smoothing) in at
        least fp32. Latents are smaller than hidden states.

        Each MTP module looks up an embedding, and projects two hidden states to one like a
        column-parallel linear (4, or 2 gathers and a reduce-scatter = 6). Its features are gathered
        (1), or exchanged for tokens forward and backward (1/t each). Output layer and loss run once
        more.
        """
        sequence = self.parallel.sequence_parallel
        feature = self.tokens * self.element * (self.tp - 1) / self.tp
        unit = self.model.hidden_size * feature
        numbers = 3 if self.layout.config.training.label_smoothing else 2
        loss = self.tp * numbers * self.tokens * self.master
        for stage, spec in self.stages.items():
            twice = self.recomputed[stage]  # forwards of the whole stage
            exchanged = self._exchanged(spec.mtp)
            sent = [self._features(*layer) for layer in self._layers_of(stage)]
            forward = sum(features for features, _ in sent) + exchanged
            backward = sum(features for _, features in sent) + exchanged
            yield Flow(
                "tp", "activations of layers", self.microbatches * (forward + backward) * feature
            )
            again = self.microbatches * self._repeated(stage) + twice * forward
            yield Flow("tp", "recomputed activations", again * feature)
            trains = self.model.trains_all  # a frozen embedding has no backward
            once = 1 if sequence else 2
            embedding = (2 if trains else once) * self.microbatches + once * twice
            yield Flow("tp", "embedding", (spec.embedding + spec.mtp) * embedding * unit)
            yield Flow("tp", "lengths of adapted rows", self._lengths(stage))
            yield Flow("tp", "norms of all heads", self._norms_together(stage))
            yield Flow("tp", "what all heads look at", self._looked_at(stage))
            if spec.head:
                runs = 1 + self.model.mtp_num_layers
                again = trains or self.layout.config.memory.recomputes_logits
                often = (2 + again) * self.microbatches + twice  # or for logits
                head = often if sequence else 2 * self.microbatches
                yield Flow("tp", "output layer", runs * head * unit)
                whole = wire_bytes("all_gather", loss, self.tp)
                yield Flow("tp", "cross entropy", runs * (self.microbatches + twice) * whole)
        size = wire_bytes("all_reduce", self._held("tp") * self.gradient, self.tp)
        yield Flow("tp", "gradients of replicated parameters", size)

    def _lengths(self, stage: int) -> float:
        """Bytes of the sums of row lengths (DoRA), in a stage of the program."""
        each = (
            summed_lengths(self.layout, *layer) for layer in recomputed_layers(self.layout, stage)
        )
        forward, again = (sum(numbers) for numbers in zip((0, 0), *each, strict=True))
        runs = (self.microbatches + self.recomputed[stage]) * forward + self.microbatches * again
        return self.slices * wire_bytes("all_reduce", runs * max(self.element, 4), self.tp)

    def _norms_together(self, stage: int) -> float:
        """Bytes of the sums for norms over all heads: two numbers per token, of queries and of
        keys."""
        runs = 0
        for layer, recompute in recomputed_layers(self.layout, stage):
            if not self.model.is_softmax(layer):
                continue
            again = recompute.whole or "a2a_overlap_attn" in recompute.modules
            runs += self.recomputed[stage] + (2 + again) * self.microbatches
        size = 2 * self.tokens * max(self.element, 4) * runs * self.model.norms_together
        return wire_bytes("all_reduce", size, self.tp)

    def _looked_at(self, stage: int) -> float:
        """Bytes with which ranks compute the indexers' losses."""
        if not self.model.trains_indexer:
            return 0.0
        cores = (self._layer(n).one(SparseAttention) for n, _ in self._layers_of(stage))
        numbers = self.microbatches * sum(
            core.summed(self.running, self.at["cp"]) for core in cores
        )
        return wire_bytes("all_reduce", numbers * max(self.element, 4), self.tp)

    def _layers_of(self, stage: int) -> Iterator[tuple[int, Running]]:
        """The layers of a stage of the program, and how each is run."""
        running = replace(self.running, memory=self.layout.memory_of(stage))
        for place, layer in placed_layers(self.model, self.stages[stage]):
            yield layer, at_place(running, place)

    def _exchanged(self, predictions: int) -> float:
        """Features per token that the projections of predictions exchange, in one direction."""
        sequence = self.parallel.sequence_parallel
        return predictions * self.model.hidden_size / self.tp if sequence else 0.0

    def _repeated(self, stage: int) -> float:
        """Features per token that recomputation in the backward of a stage sends.

        These are those of the forward, except that recomputation stops at the last saved tensor,
        before the sum that ends an MLP (unless a dropout mask or a norm follows, which ends each
        MTP module).
        """
        last = (1 if self.parallel.sequence_parallel else 2) * self.model.hidden_size
        features = 0.0
        for number, recompute in recomputed_layers(self.layout, stage):
            layer = self._layer(number)
            if not recompute.whole:
                features += self._repeated_block(layer, {*recompute.modules})
                continue
            features += self._features(number)[0] + self._tiled_again(layer)
            if recompute.ends_group:
                skipped = float(last * layer.ends_with_sum)
                if self._is_tiled(layer) and not layer.keeps_end:
                    skipped = (self._tiled_again(layer) + skipped) * self._last_tile
                features -= skipped
        if self.layout.memory_of(stage).recompute_granularity == "full":
            features += self._exchanged(self.stages[stage].mtp)
        return features

    @property
    def _last_tile(self) -> float:
        """Share of the tokens in the last tile, whose forward a recomputed layer leaves out."""
        memory = self.layout.config.memory
        return memory.last_tile(self.tokens // self.parallel.token_parts)

    def _tiled_again(self, layer: Layer) -> int:
        """Features per token sent when the tiles of a recomputed layer's MLP are recomputed."""
        if not self._is_tiled(layer):
            return 0
        sequence = self.parallel.sequence_parallel
        return sum(op.tensor_features(sequence_parallel=sequence)[0] for op in layer.recomputed_mlp)

    def _is_tiled(self, layer: Layer) -> bool:
        """Whether the layer's MLP runs in tiles of the tokens."""
        return self.layout.config.memory.tiled_mlp_num_shards > 1 and layer.kind.dense

    def _repeated_block(self, layer: Layer, modules: set[str]) -> int:
        """Like `_repeated` for these modules of a layer: up to the last linear layer's input."""
        linears: Sequence[Operation] = ()
        if "mlp" in modules and layer.kind.dense:
            linears = layer.recomputed_mlp
        elif "moe" in modules and layer.kind.experts:
            linears = layer.mlp if self.model.keeps_shared else layer.recomputed_mlp
        elif "shared_experts" in modules and layer.kind.experts:
            linears = layer.recomputed_mlp
        again = modules & {"mla_up_proj", "a2a_overlap_attn"}
        attention = [op for op in layer.attention if again & {*op.rerun_by}]
        sequence = self.parallel.sequence_parallel
        operations = (*attention, *linears)
        return sum(op.tensor_features(sequence_parallel=sequence)[0] for op in operations)

    def context_parallel(self) -> Iterator[Flow]:
        """Keys and values, or the heads-for-tokens exchange, of every layer of this rank."""
        grid, model = self.layout.grid, self.model
        if grid.cp == 1:
            return
        sizes = self.parallel.hierarchical_context_parallel_sizes
        for stage, spec in self.stages.items():
            whole, kernels = self._recomputed_attention(stage)
            for layer in all_layers(model, spec):
                if model.is_linear(layer):
                    yield self._states(layer, self.recomputed[stage], layer in whole)
                if not model.is_softmax(layer):
                    continue
                kind, own = self.parallel.cp_comm_of(layer), model.as_in(layer)
                gathered, core = kind == "all_gather", self._layer(layer).one(CoreAttention)
                # A ring accumulates gradients in flight, in the master dtype; others at the target.
                volumes = partial(
                    context_volumes,
                    kind,
                    grid.cp,
                    key_value=self.tokens * core.key_value_features(self.tp, gathered=gathered),
                    element=self.element,
                    grad_element=self.element if gathered else self.master,
                    key_value_heads=own.kv_heads_of(self.tp),
                    inner=sizes[0] if sizes else 1,
                    seen=seen_shares(
                        self.layout,
                        self.at["cp"],
                        model.reach_of(layer),
                        sizes[0] if kind == "a2a+p2p" else 1,
                    ),
                )
                queries = self.tokens * own.q_size / self.tp
                both = queries + self.tokens * own.attention_size / self.tp
                once = volumes(query=both)
                # Recomputing a kernel alone stops at its result, which is not sent again.
                again = volumes(query=queries if layer in kernels else both).forward
                size = once.forward + once.backward
                size += again if layer in whole | kernels else 0.0
                sent = self.microbatches * size + self.recomputed[stage] * once.forward
                yield Flow("cp", "keys, values and heads", sent)

    def _states(self, layer: int, twice: int, again: bool) -> Flow:
        """Bytes of exchanging tokens for heads before a layer's states, and back after them; both
        again in the backward, and if the layer is recomputed."""
        features = self._layer(layer).one(Recurrence).read_features + self.model.states.size
        size = self.tokens * features / self.tp * self.element
        runs = self.microbatches * (2 + again) + twice
        return Flow(
            "cp",
            "heads of states",
            runs * wire_bytes("all_to_all", size, self.parallel.context_parallel_size),
        )

    def _recomputed_attention(self, stage: int) -> tuple[set[int], set[int]]:
        """Layers whose attention is recomputed with the whole layer, and layers where only
        attention is."""
        recompute = dict(recomputed_layers(self.layout, stage))
        alone = {layer for layer, each in recompute.items() if "core_attn" in each.modules}
        around = "a2a_overlap_attn"
        whole = {layer for layer, each in recompute.items() if each.whole or around in each.modules}
        return whole, alone

    def pipeline(self) -> Iterator[Flow]:
        """Hidden states and their gradients, [T, H] or its part, and tied embeddings."""
        own = self.tokens // self.slices // self.parallel.token_parts
        size = own * self.model.hidden_size * self.element
        states = self.microbatches * self.slices * self._crossing_states()
        yield Flow("pp", "hidden states and gradients", states * size)
        # With two pipeline ranks, the pair of mirrored ranks is the whole pipeline.
        pp = self.layout.grid.pp
        copies = wire_bytes("all_reduce", self._held("mirror") * self.gradient, 2)
        yield Flow("pp" if pp == 2 else "mirror", "gradients of both copies of the model", copies)
        for ranks in tied_ranks(self.layout):
            if self.at["pp"] in ranks:
                embedding = next(record for record in self.records if "tied" in record.sums)
                size = self.place.part(embedding.shape, experts=False) * self.gradient
                tied = wire_bytes("all_reduce", size, len(ranks))
                axis = "pp" if len(ranks) == pp else "tied"
                yield Flow(axis, "gradient of the tied embedding", tied)

    def _crossing_states(self) -> int:
        """Hidden states of a token that leave this rank for the next stages, gradients included."""
        length, copies = len(self.layout.split.stages), self.layout.num_copies
        placement = with_copies(self.layout.split.placement, copies)
        states = 0
        for stage in range(1, len(placement)):
            ends = placement[stage - 1], placement[stage]
            if stage % length and ends[0] != ends[1]:  # one end sends the states, one the gradients
                states += ends.count(self.at["pp"]) * self.layout.states_into(stage)
        return states

    def scalars(self) -> Iterator[Flow]:
        """Valid token counts before the step; losses, stop votes and squared norm after it."""
        losses = 1 + self.model.mtp_num_layers
        more = (self.layout.config.training.z_loss_coeff > 0) + self.model.trains_indexer
        count = wire_bytes("all_reduce", SCALAR_BYTES, self.data)
        yield Flow("data", "token count", losses * count)
        one = wire_bytes("all_reduce", SCALAR_BYTES, self.layout.grid.world_size)
        yield Flow("world", "loss, votes and gradient norm", (losses + more + 2) * one)
        mixtures = sum(map(self.model.is_moe, all_layers(self.model, whole_model(self.model))))
        numbers = mixtures * ((self.model.num_experts or 0) + 4)
        yield Flow("world", "what routers decided", numbers * one)
        scales = 4 * num_delayed_scales(self.layout.config)  # fp32
        size = wire_bytes("all_reduce", scales, self.layout.grid.world_size)
        yield Flow("world", "largest elements of 8-bit operands", size)
        if self.layout.config.optimizer.notes_logits:
            every = all_layers(self.model, whole_model(self.model))
            heads = self.model.num_attention_heads * sum(map(self.model.is_softmax, every))
            yield Flow("world", "largest attention logits", heads * one)

    def _layer(self, layer: int) -> Layer:
        return describe_layer(self.model, layer)

    def _features(self, layer: int, running: Running | None = None) -> tuple[int, float]:
        """Features per token that tensor-parallel ranks send in a layer's forward and backward.

        See `Operation.tensor_features`; those sent in fewer bytes count as that share.

        Args:
            layer: index of the layer.
            running: how it runs; None: as layers of which nothing is recomputed.
        """
        sequence = self.parallel.sequence_parallel
        described = self._layer(layer)
        operations = described.operations
        sent = [op.tensor_features(sequence_parallel=sequence) for op in operations]
        forward, backward = (sum(features) for features in zip(*sent, strict=True))
        if sequence and self.model.trains_all and self.layout.config.keeps_latents(layer):
            backward -= self.model.kv_lora_rank  # for dW: the gathered latent is kept
        if not sequence:
            return forward, backward
        how = (running or self.running).of_kind(described.kind)
        narrow = sum(operation.gathered_narrow(how) for operation in operations)
        return forward, backward - narrow * (1 - how.input_bytes / self.element)

    def _held(self, group: str) -> int:
        """Elements of this rank's shards of parameters whose gradients a group sums."""
        return sum(
            self.place.part(record.shape, experts=record.experts)
            for record in self.records
            if group in record.sums
        )
