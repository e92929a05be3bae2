"""The router: top-k choice of experts for each token, and the weights of their results.

Shapes: T tokens of this rank, H features, E experts, K experts per token, G groups of experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.model.context import Context
from fivefold.model.leaves import local
from fivefold.model.moe.balance import Load, attach, balancing_loss, sinkhorn, z_loss
from fivefold.model.moe.capacity import with_ties, within
from fivefold.model.moe.permutation import number_of_each
from fivefold.model.norms import make_norm

Over = Callable[[Tensor], Tensor]
"""A collective over some ranks; may modify its argument."""


_TYPES: Mapping[str | None, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp64": torch.float64}
)


@dataclass(frozen=True)
class Decision:
    """A router's choice for one microbatch.

    Attributes:
        experts_TK: int64 experts of each token.
        kept_TK: whether the expert had capacity for the token; None: nothing dropped.
        loads: inputs of the balancing losses.
        sums: [E + 2] on this rank: tokens per expert before dropping, rows dropped, and this rank's
            share of the auxiliary losses once computed.
    """

    experts_TK: Tensor
    kept_TK: Tensor | None
    loads: tuple[Load, ...]
    sums: Tensor


class Decisions(dict[int, Decision]):
    """Decisions by layer, which a forward fills in.

    A class of its own, since FSDP2 of torch 2.11 hands a module a copy of every plain dict.
    """


@dataclass(frozen=True)
class ExpertChoice:
    """Experts of each token, with weights.

    Attributes:
        experts_TK: int64 experts of each token.
        weights_TK: weights of the experts' results, in at least fp32; 0 for dropped rows.
        kept_TK: whether the expert had capacity for the token; None: nothing dropped.
        num_experts: E.
        padded_to: rows that this rank sends to every expert, padded with zeros; None: no padding.
        padded_ranks_to: rows that this rank sends to every expert-parallel rank, padded with zeros;
            None: no padding.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None
    num_experts: int
    padded_to: int | None = None
    padded_ranks_to: int | None = None


@dataclass(frozen=True)
class RouterGroups:
    """Ranks over which a router sums statistics, without gradients. Default: one device.

    Attributes:
        microbatch: sum over the ranks that share the tokens of a microbatch.
        batch: sum over all ranks that see different tokens of the layer.
        gather: [T, E] of this rank -> those of all ranks of the microbatch, in rank order.
        index: index of this rank among those of the microbatch.
        ranks: number of ranks of the microbatch.
        all_ranks: number of ranks that see different tokens of the layer.
        expert_ranks: number of expert-parallel ranks, each of which holds E / EP of the experts.
    """

    microbatch: Over = lambda x: x
    batch: Over = lambda x: x
    gather: Over = lambda x: x
    index: int = 0
    ranks: int = 1
    all_ranks: int = 1
    expert_ranks: int = 1


NOTHING_YET = (-1, 0, 0)
"""`Router.batch_counts` before the first microbatch of a step."""


def plain_turns(token_ids_T: Tensor) -> Tensor:
    """Each token's turn, where experts are taken in turn: its index in the run, the same on any
    rank."""
    return token_ids_T


class Router(nn.Module):
    """Scores of all experts for each token, the choice among them, and its load balancing.

    One class because all of it reads the same logits and settings of one layer.

    Attributes:
        surroundings: seam for sums over ranks.
        choice: seam for what the router decides.
        limit: seam for dropping tokens beyond an expert's capacity.
        expert_bias: [E], added to the scores for the choice only (Wang et al., Auxiliary-Loss-Free
            Load Balancing, 2024); None without such balancing.
        norm: norm of what it reads, or None.
        expert_scale: [E], factors of the experts' weights; None: there are none.
        loss_scale: factor of the losses in their gradients, scalar; None: 1.
        global_batch_size: rows of the step over all ranks, as `begin_step` was told.
        batch_counts: (step, [E] tokens per expert in the step's microbatches so far, number of
            tokens), for global_aux_loss.
    """

    expert_bias: Tensor | None
    bias: nn.Parameter | None
    expert_scale: nn.Parameter | None

    def __init__(self, model: ModelConfig, layer: int, settings: ExpertsConfig) -> None:
        super().__init__()
        assert model.num_experts is not None, "a router needs experts"
        experts, hidden = model.num_experts, model.hidden_size
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.empty(experts)) if model.add_bias_linear else None
        own = model.moe_branch_norms
        self.norm = make_norm(model) if own else None
        self.expert_scale = nn.Parameter(torch.empty(experts)) if own else None
        with_bias = model.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(experts) if with_bias else None)
        self.model, self.layer, self.settings = model, layer, settings
        self.global_batch_size = 1
        self.surroundings = RouterGroups()
        self.choice: Choice = plain_choice
        self.limit: Limit = plain_limit
        self.turns: Callable[[Tensor], Tensor] = plain_turns
        self.loss_scale: Tensor | None = None
        self.batch_counts: tuple[int, Tensor | int, int] = NOTHING_YET

    def forward(self, x_TH: Tensor, context: Context) -> ExpertChoice:
        """The experts of each token; in training, auxiliary losses are attached to the weights."""
        logits_TE = self._logits(x_TH, context)
        layer = self.number(context)
        decided: Decision | None = context.routing.get(layer)
        if decided is None:
            with torch.no_grad():
                decided = self._decide(logits_TE, context)
            context.routing[layer] = decided
        weights_TK = self._weights(logits_TE, decided)
        if self.training and torch.is_grad_enabled():
            loss = self._loss(logits_TE, decided, context)
            if loss is not None:
                decided.sums[-1] = loss.detach()
                weights_TK = attach(weights_TK, loss, self.loss_scale)
        settings, tokens = self.settings, len(x_TH)
        pads = settings.moe_pad_expert_input_to_capacity
        return ExpertChoice(
            decided.experts_TK,
            weights_TK,
            decided.kept_TK,
            logits_TE.shape[1],
            settings.capacity(tokens, self.model) if pads else None,
            settings.rank_capacity(tokens, self.model, self.surroundings.expert_ranks),
        )

    def number(self, context: Context) -> int:
        """The number of the layer that it decides for: its own, or that of another one with the
        same weights."""
        return self.layer + context.shift

    def begin_step(self, global_batch_size: int) -> None:
        """Begin a step of so many rows over all ranks.

        Counts of an earlier attempt at the same step are forgotten, since that attempt may have
        been discarded.
        """
        self.global_batch_size = global_batch_size
        self.batch_counts = NOTHING_YET

    def update_bias(self, counts_E: Tensor) -> None:
        """Move every expert's bias by the update rate towards an even load, unless it is frozen.

        Args:
            counts_E: tokens per expert in the whole step, over all ranks.
        """
        if self.expert_bias is not None and self.model.trains_all:
            counts_E = counts_E.to(self.expert_bias.dtype)
            step = torch.sign(counts_E.mean() - counts_E)
            self.expert_bias.add_(step, alpha=self.settings.moe_router_bias_update_rate)

    def _logits(self, x_TH: Tensor, context: Context) -> Tensor:
        """Router logits [T, E] in at least fp32; with a norm, divided by the square root of H."""
        if self.norm is not None:
            x_TH = self.norm(x_TH)
        jitter = self.settings.moe_input_jitter_eps
        if jitter is not None and context.dropout is not None:
            noise_TH = context.dropout.uniform(x_TH.shape[1], f"layers.{self.layer}.mlp.router")
            x_TH = x_TH * (1 - jitter + 2 * jitter * noise_TH).to(x_TH.dtype)
        wide = _TYPES.get(self.settings.moe_router_dtype, x_TH.dtype)
        wide = torch.promote_types(wide, x_TH.dtype)
        bias = None if self.bias is None else local(self.bias).to(wide)
        logits_TE = F.linear(x_TH.to(wide), local(self.weight).to(wide), bias)
        logits_TE = logits_TE.to(torch.promote_types(wide, torch.float32))
        return logits_TE if self.norm is None else logits_TE * x_TH.shape[1] ** -0.5

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.model.moe_router_score_function == "sigmoid":
            return logits_TE.sigmoid()
        return logits_TE.softmax(-1)

    def _decide(self, logits_TE: Tensor, context: Context) -> Decision:
        experts_TK, kept_TK = self.choice(self, logits_TE, context)
        counts_E = number_of_each(experts_TK, logits_TE.shape[1])
        dropped = counts_E.new_zeros(()) if kept_TK is None else (~kept_TK).sum()
        sums = torch.cat([counts_E, dropped[None], torch.zeros_like(dropped)[None]])
        loads = tuple(self._loads(logits_TE, context)) if self.training else ()
        return Decision(experts_TK, kept_TK, loads, sums.double())

    def choose(self, logits_TE: Tensor, context: Context) -> Tensor:
        """The experts [T, K] of each token.

        Sinkhorn's assignment depends on the whole batch, so that tokens see later ones. It is for
        training only: in evaluation each token gets its best experts, as in Megatron-LM.
        """
        topk, experts = self.model.moe_router_topk, logits_TE.shape[1]
        if self.settings.moe_router_force_load_balancing:
            assert context.token_ids_T is not None
            turn_T1 = self.turns(context.token_ids_T)[:, None] * topk
            return (turn_T1 + torch.arange(topk, device=turn_T1.device)) % experts
        if self.training and "sinkhorn" in self.settings.moe_router_load_balancing_type:
            ranks = self.surroundings
            every = sinkhorn(ranks.gather(logits_TE))
            return every.chunk(ranks.ranks)[ranks.index].topk(topk).indices
        # The same order of experts; groups are compared by sums of logits, as in Megatron-LM.
        by_logits = self.model.weighs_chosen and self.expert_bias is None
        scores_TE = logits_TE if by_logits else self._scores(logits_TE)
        if self.expert_bias is not None:
            scores_TE = scores_TE + self.expert_bias.to(scores_TE.dtype)
        return self._limited(scores_TE).topk(topk).indices

    def _limited(self, scores_TE: Tensor) -> Tensor:
        """Scores of experts in a token's best groups; -inf for other experts (DeepSeek-V2)."""
        model = self.model
        groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
        if groups is None or chosen is None:
            return scores_TE
        scores_TGe = scores_TE.unflatten(1, (groups, -1))
        best = model.moe_router_group_scores or max(model.moe_router_topk // chosen, 1)
        of_groups_TG = scores_TGe.topk(best).values.sum(-1)
        kept_TG = torch.zeros_like(of_groups_TG, dtype=torch.bool)
        kept_TG.scatter_(1, of_groups_TG.topk(chosen).indices, True)
        return scores_TGe.masked_fill(~kept_TG[:, :, None], float("-inf")).flatten(1)

    def within_capacity(self, experts_TK: Tensor, logits_TE: Tensor) -> Tensor | None:
        """[T, K] whether an expert, and then its rank, has capacity for a token of this rank."""
        ranks = self.surroundings.expert_ranks
        limits = self.settings.limits(len(experts_TK), self.model, ranks)
        if not limits:
            return None
        weights_TE = None
        if self.settings.moe_token_drop_policy == "probs":
            weights_TK = with_ties(self._shares(logits_TE, experts_TK))
            weights_TE = torch.zeros_like(logits_TE).scatter_(1, experts_TK, weights_TK)
        kept_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, experts_TK, True)
        for room, group in limits:
            kept_TE = within(room, group, kept_TE, weights_TE)
        return kept_TE.gather(1, experts_TK)

    def _weights(self, logits_TE: Tensor, decided: Decision) -> Tensor:
        """Weights [T, K] of the chosen experts' results; 0 for dropped rows."""
        weights_TK = self._shares(logits_TE, decided.experts_TK)
        if self.expert_scale is not None:
            scale_E = local(self.expert_scale).to(weights_TK.dtype)
            weights_TK = weights_TK * scale_E[decided.experts_TK]
        if self.model.moe_router_topk_scaling_factor is not None:
            weights_TK = weights_TK * self.model.moe_router_topk_scaling_factor
        kept_TK = decided.kept_TK
        return weights_TK if kept_TK is None else weights_TK.masked_fill(~kept_TK, 0.0)

    def _shares(self, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Weights [T, K] of the chosen experts before they are scaled, or dropped."""
        if self.model.weighs_chosen:
            return logits_TE.gather(1, experts_TK).softmax(-1)
        weights_TK = self._scores(logits_TE).gather(1, experts_TK)
        if self.model.moe_router_score_function == "sigmoid" and self.model.moe_router_topk > 1:
            epsilon = self.model.moe_router_norm_epsilon
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + epsilon)
        return weights_TK

    def _loads(self, logits_TE: Tensor, context: Context) -> Iterator[Load]:
        """Inputs of each balancing loss, from all ranks; counts choices by score without bias."""
        ranks, settings = self.surroundings, self.settings
        if not settings.aux_losses:
            return
        tokens, experts = logits_TE.shape
        chosen_TK = self._scores(logits_TE).topk(self.model.moe_router_topk).indices
        chosen_TE = torch.zeros_like(logits_TE).scatter_(1, chosen_TK, 1.0)
        for kind, _ in settings.aux_losses:
            if kind == "seq_aux_loss":
                counts_BE = logits_TE.new_zeros(context.microbatch_rows, experts)
                counts_BE.index_add_(0, context.rows_T, chosen_TE)
                row = tokens * ranks.ranks // context.microbatch_rows
                yield Load(kind, ranks.microbatch(counts_BE), row)
            elif kind == "aux_loss":
                yield Load(kind, ranks.microbatch(chosen_TE.sum(0)), tokens * ranks.ranks)
            else:
                yield self._so_far(chosen_TE, context.step)

    def _so_far(self, chosen_TE: Tensor, step: int) -> Load:
        """The load over the global batch's microbatches up to this one."""
        last, counts_E, tokens = self.batch_counts
        here_E = self.surroundings.batch(chosen_TE.sum(0))
        if last != step:
            counts_E, tokens = 0, 0
        tokens += len(chosen_TE) * self.surroundings.all_ranks
        counts_E = counts_E + here_E
        self.batch_counts = step, counts_E, tokens
        return Load("global_aux_loss", counts_E, tokens)

    def _loss(self, logits_TE: Tensor, decided: Decision, context: Context) -> Tensor | None:
        """This rank's share of the sum of all auxiliary losses of the global batch."""
        factor_z = self.settings.moe_z_loss_coeff
        tokens = len(logits_TE) * self.surroundings.ranks
        parts = []
        if decided.loads:
            scores_TE = self._scores(logits_TE)
            if self.model.moe_router_score_function == "sigmoid":
                scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
            topk = self.model.moe_router_topk
            for load, (_, factor) in zip(decided.loads, self.settings.aux_losses, strict=True):
                loss = balancing_loss(load, scores_TE, context.rows_T, topk, tokens)
                parts.append(factor * loss)
        if factor_z:
            parts.append(factor_z * z_loss(logits_TE, tokens))
        if not parts:
            return None
        return torch.stack(parts).sum() * (context.microbatch_rows / self.global_batch_size)


Choice = Callable[[Router, Tensor, Context], tuple[Tensor, Tensor | None]]
"""(router, logits [T, E], context) -> experts [T, K] of each token, and as `Limit` has it."""


def plain_choice(
    router: Router, logits_TE: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    """By scores; replaced where a run in few bits is compared with one in fp64."""
    experts_TK = router.choose(logits_TE, context)
    return experts_TK, router.limit(router, experts_TK, logits_TE)


Limit = Callable[[Router, Tensor, Tensor], Tensor | None]
"""(router, experts [T, K], logits [T, E]) -> [T, K] whether there is capacity; None: always."""


def plain_limit(router: Router, experts_TK: Tensor, logits_TE: Tensor) -> Tensor | None:
    """Capacity over this rank's tokens; replaced where one device stands in for several ranks."""
    return router.within_capacity(experts_TK, logits_TE)
