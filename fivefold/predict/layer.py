"""How long the parts of a model take on one rank, for one microbatch: by module and by cause.

Every multiplication follows from the shapes that `model.shape` counts; every transfer from the
group that `mesh.grid` lays out. What a module costs is split into computation and what each kind
of parallelism leaves exposed of its communication.
"""

from collections.abc import Callable
from functools import cached_property

from fivefold.layout import Layout
from fivefold.model.activations import Running, saved_activations, total
from fivefold.model.shape import layer_shapes, local_shape
from fivefold.predict.cluster import Cluster
from fivefold.predict.communication import all_reduce, all_to_all, gather, span, token_copies
from fivefold.predict.compute import (
    CAST,
    RECIPE_RATE,
    Phases,
    elementwise,
    matmul,
    overlapped,
    score_matrices,
)
from fivefold.predict.context import configured_way
from fivefold.predict.recomputation import rerun_modules
from fivefold.predict.software import Software
from fivefold.predict.stage_times import Times, repeated

ELEMENT = 2.0  # bytes of an activation in bf16, whatever precision multiplies
UNFUSED_TRAFFIC = 2.0  # times the bytes of a fused elementwise kernel
TP_OVERLAP = 0.6
"""Share of a collective that cutting it and its multiplication into pieces hides: the first piece
has nothing beside it, and small pieces run slower."""
Blocks = dict[tuple[object, ...], dict[str, Times]]
"""Modules of blocks by what they depend on."""


class LayerTimes:
    """The times of a layout's layers and ends on a cluster; each is computed once.

    Args:
        layout: of which.
        cluster: on what.
        software: that runs it.
        known: blocks' modules by the degrees that they depend on, to share among layouts of one
            model on one cluster.
    """

    def __init__(
        self,
        layout: Layout,
        cluster: Cluster,
        software: Software,
        known: Blocks | None = None,
    ) -> None:
        config, grid = layout.config, layout.grid
        self.config = config
        self.cluster, self.software = software.on(cluster), software
        self.gpu = self.cluster.gpu
        self.model, self.parallel, self.grid = config.model, config.parallel, grid
        self.memory, self.training = config.memory, config.training
        training = config.training
        self.tokens = training.micro_batch_size * training.seq_length // grid.cp
        self.parts = grid.tp if self.parallel.sequence_parallel else 1
        narrow = "fp4" if training.fp4_format else "fp8" if training.fp8_format else None
        self.precision = narrow or training.precision
        self.tp = span(cluster, grid.tp, 1)
        self.ep = span(cluster, grid.ep, grid.etp)
        self.etp = span(cluster, grid.etp, 1)
        self._known: dict[tuple[bool, bool], Times] = {}
        self._blocks = {} if known is None else known

    @cached_property
    def hidden_bytes(self) -> float:
        """Of the hidden state of all the microbatch's tokens on this rank's tensor group."""
        return self.tokens * self.model.hidden_size * ELEMENT

    def layer(self, is_moe: bool, recomputed: bool) -> Times:
        """One layer; `recomputed`: full recomputation runs its forward again."""
        if (is_moe, recomputed) not in self._known:
            names = None if recomputed else rerun_modules(self.memory)
            key = ("layer", is_moe, names, *self._degrees(is_moe))
            whole = self._once(key, lambda: {"layer": self._with_again(is_moe, names)})["layer"]
            self._known[is_moe, recomputed] = self._copied(self._issued(whole, is_moe), is_moe)
        return self._known[is_moe, recomputed]

    def _with_again(self, is_moe: bool, names: tuple[str, ...] | None) -> Times:
        """A layer, with these of its modules run again; None: all."""
        modules, key = self._modules(is_moe), ("sum", is_moe, *self._degrees(is_moe))
        plain = self._once(key, lambda: {"layer": sum(modules.values(), Times())})["layer"]
        if names is None:
            return plain + repeated(plain)
        if names and self.software.keeps_every_second:
            return plain + repeated(self._every_second())
        return plain + repeated(sum((modules[n] for n in names if n in modules), Times()))

    def _every_second(self) -> Times:
        """Of q, k, v, o, gate, up and down the even ones, and what is no multiplication.

        With tensor parallelism not o, whose sum over the ranks is kept.
        """
        attention, mlp = self._shapes(0), self._shapes(self._first(False))
        again = (attention["self_attn.k_proj.weight"], mlp["mlp.up_proj.weight"])
        gathered = (self._column(self._linear(weight, self.tokens)) for weight in again)
        output = Times()
        if self.grid.tp == 1:
            output = Times(self._linear(attention["self_attn.o_proj.weight"], self.tokens))
        act = self._activation(self.tokens * mlp["mlp.up_proj.weight"][0])
        return sum(gathered, output + act + self._norm() * 2)

    def host(self, is_moe: bool) -> float:
        """Seconds in which the host issues a layer's forward; a backward takes twice that."""
        operations = 25 if self.software.fused else 45
        if is_moe:
            narrow = self.precision in ("fp8", "fp4")
            local = (self.model.num_experts or 0) // self.grid.ep
            operations += 100 + local * (8 if narrow else 4)
        return operations * self.cluster.host_operation

    def _issued(self, times: Times, is_moe: bool) -> Times:
        """No phase is shorter than the host takes to issue its operations."""
        host, total = self.host(is_moe), times.total
        wait = Phases(
            max(0.0, host - total.forward),
            max(0.0, 2 * host - total.dx - total.dw),
        )
        return times + Times(compute=wait)

    def _copied(self, times: Times, is_moe: bool) -> Times:
        """What offloaded activations wait for the host's link, while a layer's own work lasts."""
        if not self.memory.fine_grained_activation_offloading:
            return times
        saved = saved_activations(self.model, self._first(is_moe), Running.of(self.config))
        seconds = self.tokens * total(saved).offloaded / self.cluster.host_bandwidth
        whole = times.total
        wait = Phases(max(0.0, seconds - whole.forward), max(0.0, seconds - whole.dx - whole.dw))
        return times + Times(offload=wait)

    def _degrees(self, is_moe: bool) -> tuple[object, ...]:
        """What the modules of a layer depend on, beside the model and the cluster."""
        attention = (self.grid.tp, self.parts, self.grid.cp, self.tokens)
        if not is_moe:
            return attention
        dispatcher = self.parallel.moe_token_dispatcher_type
        return (*attention, self.grid.ep, self.grid.etp, dispatcher)

    def _modules(self, is_moe: bool) -> dict[str, Times]:
        attention = self._once(("attention", *self._degrees(False)), self._attention_block)
        if is_moe:
            return attention | self._once(("experts", *self._degrees(True)), self._experts)
        return attention | self._once(("dense", *self._degrees(False)), self._dense_mlp)

    def _once(
        self, key: tuple[object, ...], block: Callable[[], dict[str, Times]]
    ) -> dict[str, Times]:
        if key not in self._blocks:
            self._blocks[key] = block()
        return self._blocks[key]

    def _attention_block(self) -> dict[str, Times]:
        model = self.model
        shapes = self._shapes(0)  # attention is the same in every layer
        modules = {"attn_norm": self._norm(), "attn_residual": self._residual()}
        if model.multi_latent_attention:
            down = [n for n in ("q_a_proj", "kv_a_proj") if f"self_attn.{n}.weight" in shapes]
            up = [
                n for n in ("q_proj", "q_b_proj", "kv_b_proj") if f"self_attn.{n}.weight" in shapes
            ]
            linears = [
                self._linear(shapes[f"self_attn.{n}.weight"], self.tokens // self.parts)
                for n in down
            ]
            modules["qkv"] = self._column(sum(linears, Phases()))
            ups = [self._linear(shapes[f"self_attn.{n}.weight"], self.tokens) for n in up]
            modules["mla_up"] = Times(sum(ups, Phases()))
        else:
            rows = [shapes[f"self_attn.{n}_proj.weight"][0] for n in "qkv"]
            modules["qkv"] = self._column(self._joined(rows, self.tokens))
        modules["core_attn"] = self._core_attention()
        modules["attn_proj"] = self._row(
            self._linear(shapes["self_attn.o_proj.weight"], self.tokens)
        )
        return modules

    def _dense_mlp(self) -> dict[str, Times]:
        shapes = self._shapes(self._first(False))
        return {
            "mlp_norm": self._norm(),
            "mlp_residual": self._residual(),
            **self._mlp("mlp", shapes, self.tokens, "fc1", "mlp_act", "fc2"),
        }

    def _mlp(
        self, name: str, shapes: dict[str, tuple[int, ...]], tokens: int, *names: str
    ) -> dict[str, Times]:
        fc1, act, fc2 = names
        inner = shapes[f"{name}.up_proj.weight"][0]
        wide = [inner] * (2 if self.model.gated_linear_unit else 1)
        hidden = self.model.hidden_size
        return {
            fc1: self._column(self._joined(wide, tokens)),
            act: self._activation(tokens * inner),
            fc2: self._row(self._linear((hidden, inner), tokens)),
        }

    def _first(self, is_moe: bool) -> int:
        layers = range(self.model.num_layers)
        return next(n for n in layers if self.model.is_moe(n) == is_moe)

    def _shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        grid = self.grid
        return {
            name: local_shape(self.model, name, shape, tp=grid.tp, ep=grid.ep, etp=grid.etp)
            for name, shape in layer_shapes(self.model, layer).items()
        }

    def _linear(
        self,
        weight: tuple[int, ...],
        tokens: int,
        batch: int = 1,
        precision: str | None = None,
    ) -> Phases:
        """A linear layer [out, in] on `tokens` rows (each of a batch of them has)."""
        n, k = weight
        gpu, kind = self.gpu, precision or self.precision
        forward = matmul(gpu, tokens, n, k, kind, batch)
        dx = matmul(gpu, tokens, k, n, kind, batch)
        dw = matmul(gpu, n, k, tokens, kind, batch, 8.0)  # accumulates in fp32
        if kind in ("fp8", "fp4"):
            recipe = "nvfp4" if kind == "fp4" else self.training.fp8_recipe
            share, cast = RECIPE_RATE[recipe], CAST[recipe]
            forward, dx, dw = forward / share, dx / share, dw / share
            forward += elementwise(gpu, cast * batch * tokens * k)
            dx += elementwise(gpu, cast * batch * tokens * n)
        return Phases(forward, dx, dw)

    def _joined(self, rows: list[int], tokens: int) -> Phases:
        """Linear layers of the hidden state with so many rows each, as one if they are joined."""
        parts = [sum(rows)] if self.software.joins_linears else rows
        hidden = self.model.hidden_size
        return sum((self._linear((n, hidden), tokens) for n in parts), Phases())

    def _column(self, linear: Phases) -> Times:
        """A column-parallel linear layer: X is gathered before it, dX is reduced after."""
        if self.grid.tp == 1:
            return Times(linear)
        whole = self.hidden_bytes
        if self.parallel.sequence_parallel:
            move = gather(self.cluster, self.tp, whole)
            forward = self._beside(linear.forward, move)
            if not self.software.overlaps_backward_tp:
                return Times(linear, tp=Phases(forward, self._beside(linear.dx, move)))
            again = overlapped(self.gpu, linear.dx, move)  # X, gathered again for dW
            back = overlapped(self.gpu, linear.dw, move)
            return Times(linear, tp=Phases(forward, again + back))
        back = all_reduce(self.cluster, self.tp, whole)
        if self.software.overlaps_backward_tp:
            back = overlapped(self.gpu, linear.dw, back)
        return Times(linear, tp=Phases(0.0, back))

    def _row(self, linear: Phases) -> Times:
        """A row-parallel linear layer: the result is reduced, dY is gathered for the backward."""
        if self.grid.tp == 1:
            return Times(linear)
        whole = self.hidden_bytes
        if self.parallel.sequence_parallel:
            move = gather(self.cluster, self.tp, whole)
            return Times(
                linear,
                tp=Phases(self._beside(linear.forward, move), self._beside(linear.dx, move)),
            )
        return Times(linear, tp=Phases(all_reduce(self.cluster, self.tp, whole)))

    def _beside(self, work: float, move: float) -> float:
        """What is exposed of a collective that the multiplication it serves may hide, in pieces."""
        if not self.parallel.tp_comm_overlap:
            return move
        hidden = TP_OVERLAP * move
        return move - hidden + overlapped(self.gpu, work, hidden)

    def _elementwise(self, forward: float, backward: float) -> Times:
        """Kernels that read and write so many bytes."""
        times = 1.0 if self.software.fused else UNFUSED_TRAFFIC
        kernels = 1 if self.software.fused else 4
        gpu = self.gpu
        return Times(
            Phases(
                elementwise(gpu, forward * times, kernels),
                elementwise(gpu, backward * times, kernels),
            )
        )

    def _norm(self) -> Times:
        size = self.hidden_bytes / self.parts
        return self._elementwise(2 * size, 3 * size)

    def _residual(self) -> Times:
        """The sum, a bias and dropout before it; their gradients."""
        size = self.hidden_bytes / self.parts
        mask = size / 2 if self.model.hidden_dropout else 0.0
        return self._elementwise(3 * size + mask, (5 if mask else 3) * size + mask)

    def _activation(self, elements: float) -> Times:
        reads = 2 if self.model.gated_linear_unit else 1
        size = elements * ELEMENT
        return self._elementwise((reads + 1) * size, (2 * reads + 1) * size)

    def _core_attention(self) -> Times:
        model, tp = self.model, self.grid.tp
        length = self.training.seq_length
        heads = model.num_attention_heads // tp
        mixed = self.tokens * ELEMENT * (model.q_size + model.k_size) / tp
        rotary = (
            self._elementwise(2 * mixed, 2 * mixed)
            if model.position_embedding_type == "rope"
            else Times()
        )
        if model.attention_dropout and self.software.attention == "scores":
            batch = self.tokens // length * heads
            dims, precision = (model.query_dim, model.value_dim), self.training.precision
            return rotary + Times(score_matrices(self.gpu, batch, length, dims, precision))
        way = configured_way(self.config, self.cluster)
        return rotary + Times(way.attention, cp=way.exposed)

    def _experts(self) -> dict[str, Times]:
        """Router, dispatch, the experts, combine, and the experts that see every token."""
        model, grid = self.model, self.grid
        assert model.num_experts is not None
        shapes = self._shapes(self._first(True))
        own = self.tokens // self.parts
        rows = own * model.moe_router_topk * grid.etp
        local = model.num_experts // grid.ep
        each = max(1, round(rows * self.software.imbalance / local))
        inner, hidden = shapes["mlp.experts.up_proj.weight"][1], model.hidden_size
        wide = inner * (2 if model.gated_linear_unit else 1)
        permute = self._elementwise(4 * rows * hidden * ELEMENT, 4 * rows * hidden * ELEMENT)
        moved = self._dispatch(own)
        modules = {
            "mlp_norm": self._norm(),
            "mlp_residual": self._residual(),
            "router": self._elementwise(
                own * (model.num_experts * 12 + hidden * ELEMENT),
                own * (model.num_experts * 12 + hidden * ELEMENT),
            ),
            "dispatch": permute + Times(ep=Phases(2 * moved, 2 * moved)),
            "expert_fc1": Times(self._linear((wide, hidden), each, local)),
            "moe_act": self._activation(rows * self.software.imbalance * inner),
            "expert_fc2": Times(self._linear((hidden, inner), each, local)),
        }
        if model.shared_ffn_size:
            names = ("shared_fc1", "shared_act", "shared_fc2")
            modules |= self._mlp("mlp.shared_experts", shapes, self.tokens, *names)
        return modules

    def _dispatch(self, own: int) -> float:
        """Seconds in which a rank's tokens reach their experts, or return from them."""
        model, grid = self.model, self.grid
        row = model.hidden_size * ELEMENT
        tensor = gather(self.cluster, self.etp, own * model.moe_router_topk * row * grid.etp)
        if grid.ep == 1:
            return tensor
        copies, remote = token_copies(model, self.ep, self.parallel.moe_token_dispatcher_type)
        sent = all_to_all(self.cluster, self.ep, own * copies * row, own * remote * row)
        return sent * self.software.imbalance + tensor

    def embedding(self) -> Times:
        """The look-up, and its sum over the tensor-parallel ranks."""
        size = self.hidden_bytes
        moved = 0.0
        if self.grid.tp > 1:
            way = gather if self.parallel.sequence_parallel else all_reduce
            moved = way(self.cluster, self.tp, size)
        return self._elementwise(2 * size, 3 * size) + Times(tp=Phases(moved, 0.0))

    def head(self) -> Times:
        """Final norm, output layer and loss, for each token that is predicted."""
        model, fusion = self.model, self.memory.cross_entropy_loss_fusion
        entries = model.padded_vocab_size // self.grid.tp
        logits = float(self.tokens) * entries
        # 8-bit recipes leave the output layer alone.
        linear = self._linear(
            (entries, model.hidden_size), self.tokens, precision=self.training.precision
        )
        loss = self._elementwise((8 if fusion else 24) * logits, (6 if fusion else 10) * logits)
        once = self._norm() + self._column(linear) + loss
        if fusion and self.memory.cross_entropy_fusion_impl == "linear":
            once = once + Times(recompute=Phases(0.0, linear.forward))
        return once * (1 + model.mtp_num_layers)
