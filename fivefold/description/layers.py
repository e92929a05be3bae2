"""The description of a model: the operations of each kind of layer.

This is the one place that knows which layers a model has. Names are those of the modules in
`model.transformer`; layer indices from num_layers on mean multi-token prediction layers.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from fivefold.config.model import ModelConfig
from fivefold.description.experts import Dispatch, ExpertsIn, ExpertsOut, RouterLinear, SharedOut
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.latent import LatentLinear
from fivefold.description.linear_attention import linear_attention, short_convolution
from fivefold.description.lora import Adapters, Rescaled, with_adapters
from fivefold.description.mamba import mamba
from fivefold.description.operations import (
    Activation,
    ColumnLinear,
    Norm,
    Operation,
    Residual,
    RowLinear,
)
from fivefold.description.prediction import MTPInput
from fivefold.description.softmax_attention import softmax_attention
from fivefold.description.weights import (
    Weight,
    column,
    mlp_weights,
    norm_weights,
    of_experts,
    whole,
)

_SHARED_GATE = "mlp.shared_expert_gate.weight"
OperationT = TypeVar("OperationT", bound=Operation)


@dataclass(frozen=True)
class Layer:
    """The description of one kind of layer.

    Attributes:
        kind: the kind of layer described.
        operations: operations in execution order.
    """

    kind: LayerKind
    operations: tuple[Operation, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters, by their names in the layer."""
        return tuple(weight for operation in self.operations for weight in operation.weights)

    def one(self, kind: type[OperationT]) -> OperationT:
        """The only operation of type `kind`."""
        (found,) = (each for each in self.operations if isinstance(each, kind))
        return found

    @property
    def last_input(self) -> ColumnLinear | ExpertsIn:
        """The first projection into the inner features of what comes last: the MLP or experts, or
        the only mixer."""
        return self.last_inputs[0]

    @cached_property
    def last_inputs(self) -> tuple[ColumnLinear | ExpertsIn, ...]:
        """All projections into these, including those of shared experts."""
        last = self.mlp or self.attention
        return tuple(op for op in last if isinstance(op, ColumnLinear | ExpertsIn))

    @property
    def recomputed_mlp(self) -> tuple[Operation, ...]:
        """The linear layers of the MLP that its recomputation repeats: all but the last, unless the
        last one's result is kept, to be scaled."""
        kinds = ColumnLinear | ExpertsIn | Adapters | Rescaled
        if not self.kind.mlp:
            return ()
        *_, last = (op for op in self.mlp if not isinstance(op, Norm | Residual))
        again = kinds | RowLinear if isinstance(last, Rescaled) else kinds
        return tuple(op for op in self.mlp if isinstance(op, again))

    @cached_property
    def after_last_input(self) -> tuple[Operation, ...]:
        """The operations after the first of these projections."""
        return self.operations[self.operations.index(self.last_input) + 1 :]

    @cached_property
    def attention(self) -> tuple[Operation, ...]:
        """The operations up to and including the attention residual sum."""
        return self.operations[: self._middle]

    @cached_property
    def mlp(self) -> tuple[Operation, ...]:
        """The operations after the attention residual sum."""
        return self.operations[self._middle :]

    @cached_property
    def _middle(self) -> int:
        if not self.kind.attends:
            return 0
        return next(n for n, op in enumerate(self.operations, 1) if isinstance(op, Residual))

    @property
    def ends_with_sum(self) -> bool:
        """Whether the layer ends with a tensor-parallel reduction whose result nothing keeps."""
        gated = any(weight.name == _SHARED_GATE for weight in self.weights)
        return isinstance(self.operations[-2], RowLinear) and not gated and not self.keeps_end

    @property
    def keeps_end(self) -> bool:
        """Whether something after the MLP saves tensors: a norm, or dropout."""
        *_, last, residual = self.operations
        assert isinstance(residual, Residual)
        return residual.dropout or isinstance(last, Norm)


@lru_cache(maxsize=512)
def describe(model: ModelConfig, kind: LayerKind) -> Layer:
    """The operations of a kind of layer."""
    attention = _attention(model.attention_of(kind.local), kind) if kind.attends else ()
    mlp = () if not kind.mlp else _experts(model) if kind.experts else _dense(model)
    around = (_prediction(model),) if kind.predicts else ()
    operations = *around, *attention, *mlp
    if model.layer_scalar is not None and isinstance(operations[-1], Residual):
        operations = *operations[:-1], replace(operations[-1], scaled=True)
    if kind.wide:
        operations = tuple(map(_in_bf16, operations))
    adapted = operations if model.trains_all else (*with_adapters(operations, model),)
    return Layer(kind, adapted)


def _in_bf16(operation: Operation) -> Operation:
    """The same operation in a layer that stays in bf16."""
    wide = tuple(replace(weight, wide=True) for weight in operation.weights)
    return replace(operation, weights=wide)


def describe_layer(model: ModelConfig, layer: int) -> Layer:
    """The operations of a layer of the model."""
    return describe(model, layer_kind(model, layer))


def _attention(model: ModelConfig, kind: LayerKind) -> tuple[Operation, ...]:
    """Attention of any kind, with the norms and the sum around it."""
    h, before = model.hidden_size, _makes_input(model, "a2a_overlap_attn")
    convolves = model.experimental_attention_variant == "short_convolution"
    with_states = short_convolution if convolves else linear_attention
    with_states = mamba if kind.mixer == "M" else with_states
    return (
        *_norm_before("attn_norm", "input_layernorm", model, "a2a_overlap_attn"),
        *(with_states if kind.linear else softmax_attention)(model, before),
        *_norm_after("attn_output_norm", "post_self_attn_layernorm", model),
        Residual(
            "attn_residual", features=h, dropout=bool(model.hidden_dropout), mask="attn_dropout"
        ),
    )


def _mlp_norm(model: ModelConfig, *again: str) -> tuple[Norm, ...]:
    """With parallel residuals its input is attention's, and is counted there; so may its norm be,
    which then runs twice."""
    read, one = model.parallel_residual, model.parallel_residual_one_norm
    norms = _norm_before("mlp_norm", "post_attention_layernorm", model, *again, shared_input=read)
    return tuple(replace(norm, weights=()) for norm in norms) if one else norms


def _norm_before(
    name: str, module: str, model: ModelConfig, *again: str, shared_input: bool = False
) -> tuple[Norm, ...]:
    weights, rerun_by = norm_weights(module, model), ("layernorm", *again)
    norm = Norm(name, weights, rerun_by, features=model.hidden_size, shared_input=shared_input)
    return (norm,) if model.norms_before else ()


def _makes_input(model: ModelConfig, *again: str) -> tuple[str, ...]:
    """The recomputed modules that recompute the input of attention or MLP, if a norm computes
    it."""
    return ("layernorm", *again) if model.norms_before else ()


def _norm_after(name: str, module: str, model: ModelConfig) -> tuple[Norm, ...]:
    """A norm whose output is not kept, so that no recomputation repeats it."""
    norm = Norm(name, norm_weights(module, model), features=model.hidden_size)
    return (norm,) if model.norms_after else ()


def _dense(model: ModelConfig) -> tuple[Operation, ...]:
    h, inner = model.hidden_size, model.ffn_size
    first, last = mlp_weights("mlp", model, inner)
    return (
        *_mlp_norm(model),
        ColumnLinear(
            "fc1",
            first,
            ("mlp",),
            inputs=h,
            outputs=inner * _gates(model),
            recomputed_by=_makes_input(model),
            kept_whole_by=("layernorm", "mlp"),
        ),
        Activation(
            "mlp_act",
            _learned_bends(model),
            rerun_by=("mlp",),
            item="mlp_act",
            features=inner,
            widths=_gates(model),
            recomputed_by=("mlp",),
        ),
        RowLinear("fc2", last, inputs=inner, outputs=h, recomputed_by=("mlp",)),
        *_end(model),
    )


def _experts(model: ModelConfig) -> tuple[Operation, ...]:
    assert model.num_experts is not None
    h, experts, copies = model.hidden_size, model.num_experts, model.moe_router_topk
    inner, widths = model.expert_ffn_size, _gates(model)
    weighs = not model.moe_apply_probs_on_input
    each = mlp_weights("mlp.experts", model, inner, model.expert_features)
    first, last = (tuple(of_experts(weight, experts) for weight in part) for part in each)
    router = whole("mlp.router", h, experts, model.add_bias_linear)
    again, own = "a2a_overlap_post_attn", model.moe_branch_norms
    scales = (Weight("mlp.router.expert_scale", (experts,)),) if own else ()
    into_latents, out_of_latents = _latents_of_experts(model)
    return (
        *(() if own else _mlp_norm(model, again)),
        *_branch_norm("router.norm", model, again),
        RouterLinear(
            "router",
            (*router, *scales),
            ("moe", again),
            inputs=h,
            model=model,
            read=bool(model.shared_ffn_size) and not own,
            recomputed_by=("moe", again) if own else _makes_input(model, again),
        ),
        *_branch_norm("routed_norm", model, shared_input=True),
        *into_latents,
        Dispatch("dispatch", rerun_by=("moe",), copies=copies, model=model),
        ExpertsIn(
            "expert_fc1",
            first,
            ("moe", "routed_experts"),
            inputs=model.expert_features,
            outputs=inner * widths,
            copies=copies,
            features=h,
        ),
        Activation(
            "moe_act",
            rerun_by=("moe", "moe_act", "routed_experts"),
            item="moe_act",
            features=inner,
            widths=widths,
            copies=copies,
            recomputed_by=("moe", "routed_experts"),
        ),
        ExpertsOut(
            "expert_fc2",
            last,
            ("moe",),
            inputs=inner,
            outputs=model.expert_features,
            copies=copies,
            weighs=weighs,
        ),
        *out_of_latents,
        *_branch_norm("routed_output_norm", model, recomputed_by=("moe",)),
        *(_shared_experts(model) if model.shared_ffn_size else ()),
        *_end(model),
    )


def _branch_norm(
    name: str,
    model: ModelConfig,
    *again: str,
    shared_input: bool = False,
    recomputed_by: tuple[str, ...] = (),
) -> tuple[Norm, ...]:
    """A norm within a mixture, by its module there, if there are such; those before branches all
    read the residual stream, which the first of them counts."""
    if not model.moe_branch_norms:
        return ()
    return (
        Norm(
            name.replace(".", "_"),
            norm_weights(f"mlp.{name}", model),
            ("moe", *again),
            features=model.hidden_size,
            shared_input=shared_input,
            recomputed_by=recomputed_by,
            inside=True,
        ),
    )


def _latents_of_experts(model: ModelConfig) -> tuple[tuple[Operation, ...], ...]:
    """The projections before tokens are sent to experts, and after they return."""
    h, latent = model.hidden_size, model.moe_latent_size
    if latent is None:
        return (), ()
    into = whole("mlp.fc1_latent_proj", h, latent, model.add_bias_linear)
    back = whole("mlp.fc2_latent_proj", latent, h, model.add_bias_linear)
    return (
        (
            LatentLinear(
                "latent_fc1", into, ("moe",), inputs=h, outputs=latent, reads_moe_input=True
            ),
        ),
        (
            LatentLinear(
                "latent_fc2", back, ("moe",), inputs=latent, outputs=h, reads_moe_input=False
            ),
        ),
    )


def _shared_experts(model: ModelConfig) -> tuple[Operation, ...]:
    h, inner, again = model.hidden_size, model.shared_ffn_size, ("moe", "shared_experts")
    first, last = mlp_weights("mlp.shared_experts", model, inner)
    widths = _gates(model)  # the activation keeps what it reads
    gated, own = model.moe_shared_expert_gate, model.moe_branch_norms
    gate = whole(_SHARED_GATE.removesuffix(".weight"), h, 1, False) if gated else ()
    return (
        *_branch_norm("shared_norm", model, shared_input=True),
        ColumnLinear(
            "shared_fc1",
            (*first, *gate),
            again,
            inputs=h,
            outputs=inner * widths,
            shared_input=not own,
            recomputed_by=("moe",) if own else (),
            kept_whole_by=("layernorm", "shared_experts"),
        ),
        Activation("shared_act", rerun_by=again, features=inner, widths=widths),
        SharedOut(
            "shared_fc2",
            last,
            inputs=inner,
            outputs=h,
            widths=widths,
            features=h,
            gated=gated,
            shares_input=not own,
        ),
        *_branch_norm("shared_output_norm", model, recomputed_by=("moe",)),
    )


def _end(model: ModelConfig) -> tuple[Operation, ...]:
    """The operations after the last product of an MLP."""
    h, dropout = model.hidden_size, bool(model.hidden_dropout)
    residual = Residual("mlp_residual", features=h, dropout=dropout, mask="mlp_dropout")
    return *_norm_after("mlp_output_norm", "post_mlp_layernorm", model), residual


def _prediction(model: ModelConfig) -> MTPInput:
    """As in DeepSeek-V3: the hidden state and the next token's embedding are normalised and
    projected together to one hidden state; a layer and a norm follow."""
    h = model.hidden_size
    weights = (
        *norm_weights("hnorm", model),
        *norm_weights("enorm", model),
        *column("eh_proj", 2 * h, h, False),
        *norm_weights("norm", model),
    )
    return MTPInput("prediction", weights, features=h)


def _learned_bends(model: ModelConfig) -> tuple[Weight, ...]:
    """The learned parameters of an MLP's activation."""
    names = ("alpha_p", "alpha_n") if model.activation_func == "xielu" else ()
    return tuple(Weight(f"mlp.act_fn.{name}", (1,), sees="features") for name in names)


def _gates(model: ModelConfig) -> int:
    """Number of projections into the inner features."""
    return 2 if model.gated_linear_unit else 1
