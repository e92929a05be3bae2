"""Errors to plant in a layout, to show that verification finds them and what it then reports.

Each replaces something on the objects of one run; the training code is not aware of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fivefold.counts.parameters import tied_ranks
from fivefold.counts.shards import num_expert_shards
from fivefold.data_parallel.communication import ReduceScatter
from fivefold.data_parallel.replicated import ReplicatedStage, local_grad
from fivefold.layout import Layout
from fivefold.mesh.collectives import all_reduce
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.leaves import local
from fivefold.model.moe.layer import Beside, Dispatcher, Experts, RunExperts
from fivefold.model.moe.routing import ExpertChoice
from fivefold.model.transformer import Stage
from fivefold.train.engine import Engine
from fivefold.verify import plant_context


@dataclass(frozen=True)
class Plant:
    """An error to plant.

    Attributes:
        help: one-line description.
        needs: what a layout must have for the error to take effect, in words.
        fits: whether a layout has it.
        install: plants the error on one rank.
    """

    help: str
    needs: str
    fits: Callable[[Layout], bool]
    install: Callable[[Engine], None]


def _skip_tp_sum(engine: Engine) -> None:
    records = engine.model.records
    for name, record in records.items():
        records[name] = replace(record, sums=tuple(g for g in record.sums if g != "tp"))


def _skip_sums(engine: Engine, *, experts_only: bool) -> None:
    records = engine.model.records
    for index, stage in engine.model.stages.items():
        gradients = engine.model.gradients[index]
        if isinstance(gradients, ReplicatedStage):
            named = stage.named_parameters()
            chosen = {p for name, p in named if records[name].experts or not experts_only}
            for bucket in gradients.buckets:
                _keep_own_gradients(bucket, chosen)
            continue
        units: list[Any] = [m for m in stage.modules() if isinstance(m, FSDPModule)]
        for unit in units:
            if isinstance(unit, Experts) or not experts_only:
                unit.set_custom_reduce_scatter(_KeepOwn(torch.float64, torch.float64))


class _KeepOwn(ReduceScatter):
    """A reduce-scatter that ignores the other ranks."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """[P*n] -> [n]: this rank's own contribution to its part."""
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _keep_own_gradients(bucket: Any, parameters: set[nn.Parameter]) -> None:
    """Undo the sum of some gradients."""
    start, finish = bucket.start, bucket.finish
    own: dict[nn.Parameter, Tensor] = {}

    def copy_and_start() -> None:
        own.update((p, local_grad(p).clone()) for p in bucket.parameters if p in parameters)
        start()

    def finish_and_restore() -> None:
        finish()
        for parameter, grad in own.items():
            local_grad(parameter).copy_(grad)

    bucket.start, bucket.finish = copy_and_start, finish_and_restore


def _skip_tied_sum(engine: Engine) -> None:
    engine.model.groups = replace(engine.model.groups, tied=None)


def _count_own_tokens(engine: Engine) -> None:
    engine.groups = replace(engine.groups, data=None)


def _sum_dx_twice(engine: Engine) -> None:
    group = engine.groups.tp

    def twice(column: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *linears: column(_SumAgain.apply(x, group), *linears)

    for module in _with_columns(engine):
        module.column = twice(module.column)


class _SumAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


def _add_bias_on_each_rank(engine: Engine) -> None:
    extra = engine.layout.grid.tp - 1

    def biased(row: Callable[[Tensor, Linear], Tensor]) -> Callable[[Tensor, Linear], Tensor]:
        def call(x: Tensor, linear: Linear) -> Tensor:
            assert linear.bias is not None
            return row(x, linear) + extra * local(linear.bias)

        return call

    for stage in engine.model.stages.values():
        for block in stage.blocks:
            block.row = biased(block.row)


def _double_experts(engine: Engine) -> None:
    model: Any = engine.model
    finish = model.finish_gradients

    def finish_and_double() -> None:
        finish()
        for name, parameter in engine.parameters.items():
            if model.records[name].experts:
                local_grad(parameter).mul_(2)

    model.finish_gradients = finish_and_double


def _detach_router(engine: Engine) -> None:
    def detached(dispatch: Dispatcher) -> Dispatcher:
        def call(
            x_TH: Tensor,
            choice: ExpertChoice,
            run: RunExperts,
            beside: tuple[Beside, Beside] | None = None,
        ) -> Tensor:
            weights_TK = _NoGradient.apply(choice.weights_TK)
            return dispatch(x_TH, replace(choice, weights_TK=weights_TK), run, beside)

        return call

    for stage in engine.model.stages.values():
        for mixture in stage.mixtures:
            mixture.dispatch = detached(mixture.dispatch)


class _NoGradient(torch.autograd.Function):
    """Blocks the gradient of weights; balancing losses attached earlier keep theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def _count_tokens_twice(engine: Engine) -> None:
    if engine.layout.grid.dp_rank(engine.groups.rank):
        return
    routers: Any = engine.routers
    sums, experts = routers.sums, engine.layout.config.model.num_experts

    def twice(*arguments: Any) -> Tensor:
        total: Tensor = sums(*arguments)
        total[:, :experts] *= 2
        return total

    routers.sums = twice


def _with_columns(engine: Engine) -> Iterator[Stage | LayerBlock]:
    for stage in engine.model.stages.values():
        yield stage
        yield from stage.blocks


def _has_partial_gradients(layout: Layout) -> bool:
    """Whether some replicated parameter sees only part of the tokens or heads."""
    model, parallel = layout.config.model, layout.config.parallel
    few_heads = any(own.num_kv_heads % layout.grid.tp for own in model.attentions)
    each_head = model.qk_layernorm and not model.norms_together
    return layout.grid.tp > 1 and (parallel.sequence_parallel or each_head or few_heads)


def _sums_experts(layout: Layout) -> bool:
    """Whether ranks get different tokens for the same experts, with a sum that can be skipped."""
    sharded = layout.config.parallel.sharding.splits_optimizer
    ranks = num_expert_shards(layout) if sharded else layout.grid.edp
    return layout.config.model.num_experts is not None and ranks > 1


def _context_kinds(layout: Layout) -> set[str]:
    """The cp_comm_types in use; {"none"} without context parallelism."""
    return set(layout.config.parallel.cp_comm_type) if layout.grid.cp > 1 else {"none"}


PLANTS: Mapping[str, Plant] = MappingProxyType(
    {
        "skip-tp-sum": Plant(
            "do not sum the gradients of replicated parameters over tensor parallelism",
            "tensor parallelism with sequence parallelism, q/k norms or fewer KV heads than ranks",
            _has_partial_gradients,
            _skip_tp_sum,
        ),
        "skip-dp-sum": Plant(
            "do not sum gradients over data and context parallelism",
            "at least two ranks in a data- or context-parallel (sharding) group",
            lambda layout: layout.grid.dp_shard * layout.grid.cp > 1,
            partial(_skip_sums, experts_only=False),
        ),
        "skip-tied-sum": Plant(
            "do not sum the copies of an embedding that pipeline ranks share",
            "tied embeddings, or multi-token prediction, on different pipeline ranks",
            lambda layout: bool(tied_ranks(layout)),
            _skip_tied_sum,
        ),
        "own-token-count": Plant(
            "divide each data-parallel rank's loss by its own tokens, not by all",
            "data parallelism",
            lambda layout: layout.grid.dp > 1,
            _count_own_tokens,
        ),
        "double-dx": Plant(
            "sum the input gradients of column-parallel linears twice over tensor parallelism",
            "tensor parallelism without sequence parallelism",
            lambda layout: layout.grid.tp > 1 and not layout.config.parallel.sequence_parallel,
            _sum_dx_twice,
        ),
        "bias-on-each-rank": Plant(
            "add the bias of row-parallel linears on every tensor-parallel rank",
            "tensor parallelism and linears with biases",
            lambda layout: layout.grid.tp > 1 and layout.config.model.add_bias_linear,
            _add_bias_on_each_rank,
        ),
        "cp-skip-block": Plant(
            "leave out the keys and values that reach a context-parallel rank last",
            "context parallelism with cp_comm_type p2p or a2a+p2p in every layer",
            lambda layout: _context_kinds(layout) <= {"p2p", "a2a+p2p"},
            plant_context.skip_last_block,
        ),
        "cp-lose-gradients": Plant(
            "drop the gradients of keys and values that belong to other context-parallel ranks",
            "context parallelism with cp_comm_type p2p, all_gather or a2a+p2p in every layer, of "
            "keys and values rather than of the latents that all_gather sends of some models",
            lambda layout: (
                _context_kinds(layout) <= {"p2p", "all_gather", "a2a+p2p"}
                and not any(map(layout.config.keeps_latents_by, _context_kinds(layout)))
            ),
            plant_context.lose_gradients,
        ),
        "cp-rank-order": Plant(
            "leave tokens that were exchanged for heads in the order of the ranks",
            "context parallelism with cp_comm_type a2a or a2a+p2p in every layer",
            lambda layout: _context_kinds(layout) <= {"a2a", "a2a+p2p"},
            plant_context.leave_rank_order,
        ),
        "cp-local-positions": Plant(
            "count positions from the first token of a context-parallel rank",
            "context parallelism of a model that knows positions",
            lambda layout: (
                layout.grid.cp > 1 and layout.config.model.position_embedding_type != "none"
            ),
            plant_context.count_local_positions,
        ),
        "double-experts": Plant(
            "double the gradients of experts",
            "experts, and an optimizer on the device, where their gradients stay",
            lambda layout: (
                layout.config.model.num_experts is not None
                and not layout.config.memory.optimizer_off_device
            ),
            _double_experts,
        ),
        "skip-edp-sum": Plant(
            "do not sum the gradients of experts over the ranks that hold the same ones",
            "experts, and at least two ranks that hold (or shard) the same ones",
            _sums_experts,
            partial(_skip_sums, experts_only=True),
        ),
        "detach-router": Plant(
            "send experts weights that pass no gradient of the main loss to the router",
            "experts",
            lambda layout: layout.config.model.num_experts is not None,
            _detach_router,
        ),
        "double-expert-counts": Plant(
            "count the tokens of experts twice on the first data-parallel rank",
            "experts and data parallelism",
            lambda layout: layout.config.model.num_experts is not None and layout.grid.dp > 1,
            _count_tokens_twice,
        ),
    }
)
