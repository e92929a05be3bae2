"""The transformer, divided into pipeline stages: single-device code with seams for parallelism.

Hidden states are [T, H] with T = B * S tokens, row after row. Parameters keep the names of the
whole model (`layers.17.self_attn.q_proj.weight`) in every stage.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import (
    StageParts,
    has_final_norm,
    has_linear,
    prediction_prefixes,
    rotations,
    sets_of_predictions,
    tempers,
    whole_model,
)
from fivefold.model.attention.indexer import Indexer
from fivefold.model.batch import Batch
from fivefold.model.caps import capped
from fivefold.model.context import BackwardLosses, Context
from fivefold.model.dropout import Dropout
from fivefold.model.layer import TransformerLayer
from fivefold.model.layers import Column, Embedding, LayerBlock, Linear, plain_column
from fivefold.model.lora import as_if_trained, freeze
from fivefold.model.loss import LossRule, cross_entropy
from fivefold.model.moe.layer import MoE
from fivefold.model.moe.routing import Decisions, Router
from fivefold.model.norms import LayerNorm, RMSNorm, make_norm
from fivefold.model.prediction import MTPLayers, MTPModule, objective, targets
from fivefold.model.rope import Rotary, temperature
from fivefold.model.sequence_slices import KeysAndValues


def _dropped_at(site: str, x_TH: Tensor, dropout: Dropout | None, rate: float) -> Tensor:
    return x_TH if dropout is None or not rate else dropout.at(site)(x_TH, rate)


RunLayer = Callable[[Tensor, Context], Tensor]
Through = Callable[[Sequence[RunLayer], Tensor, Context], Tensor]
"""Runs the layers of a stage: [T, H] -> [T, H]."""


def plain_layers(layers: Sequence[RunLayer], x_TH: Tensor, context: Context) -> Tensor:
    """Run the layers in order; replaced when whole layers are recomputed."""
    for layer in layers:
        x_TH = layer(x_TH, context)
    return x_TH


class Stage(nn.Module):
    """A contiguous piece of the model; modules it does not hold are None.

    Tied embeddings: a stage with both ends shares one Parameter between `embed_tokens` and
    `lm_head`; else the last stage owns a copy (`shape.canonical_name`). One that has MTP
    modules but not the embedding looks tokens up in a tied output weight, else in a copy.

    Attributes:
        settings: its seed of dropout, its loss, and the length of rows.
        column: seam around the output layer.
        through: seam around the layers.
        head_loss: seam around output layer and loss together.
        cross_entropy: seam around the loss, with the signature of `loss.cross_entropy`.
        shard_tokens: seam that takes this rank's part of per-token values [T], as of residuals.
        fuses_rope, fuses_dropout: as in `model.fusions`.
        noted: losses of layers that their backwards came to know, for each that has ended.
        z_sums: parts of the latest losses that are z-loss; empty without it.
    """

    embed_tokens: Embedding | None
    embed_positions: Embedding | None
    mtp_embed_tokens: Embedding | None
    norm: LayerNorm | RMSNorm | None
    lm_head: Linear | None

    def __init__(
        self,
        model: ModelConfig,
        parts: StageParts | None = None,
        training: TrainingConfig | None = None,
        experts: ExpertsConfig | None = None,
    ) -> None:
        super().__init__()
        parts = parts or whole_model(model)
        self.settings, experts = training or TrainingConfig(), experts or ExpertsConfig()
        vocab, hidden = model.padded_vocab_size, model.hidden_size
        tokens = partial(Embedding, vocab, hidden, model.embedding_multiplier)
        self.embed_tokens = tokens() if parts.embedding else None
        self.embed_positions = _position_table(model, parts)
        self.embed_norm = _embedding_norm(model, parts)
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(model, i, experts) for i in parts.layers}
        )
        self.norm = make_norm(model) if has_final_norm(model, parts) else None
        self.lm_head = Linear(hidden, vocab, model.lm_head_bias) if parts.head else None
        sets = range(sets_of_predictions(model, parts))
        further = (_layers_of(model, each, experts) for each in sets)
        self.mtp = nn.ModuleDict({str(d): MTPModule(model, x) for d, x in enumerate(further)})
        self.mtp_embed_tokens = tokens() if parts.mtp and not parts.embedding else None
        self.model, self.parts = model, parts
        self.jitters = experts.moe_input_jitter_eps is not None
        freeze(self, model)
        self.tie()
        self.column: Column = plain_column
        self.through: Through = plain_layers
        self.head_loss: HeadLoss = plain_head_loss
        self.cross_entropy: Callable[..., Tensor] = cross_entropy
        self.shard_tokens: Callable[[Tensor], Tensor] = lambda values_T: values_T
        self.fuses_rope, self.fuses_dropout, self.z_sums = False, False, list[Tensor]()
        self.noted = BackwardLosses()
        self.rotary = Rotary(model, rotations(model, parts), self.settings.seq_length)

    @property
    def transformer_layers(self) -> list[TransformerLayer]:
        """All its layers in execution order; those of multi-token prediction come last."""
        layers: list[Any] = [*self.layers.values()]
        for each in self.predictions:
            layers += each.layer if isinstance(each.layer, MTPLayers) else [each.layer]
        return layers

    @property
    def mixtures(self) -> list[MoE]:
        """All its mixture-of-experts modules."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def predictions(self) -> list[MTPModule]:
        """Its multi-token prediction modules, in order of depth."""
        modules: list[Any] = [*self.mtp.values()]
        return modules

    @property
    def embeddings(self) -> list[Embedding]:
        """The tables in which it looks tokens up."""
        return [t for t in (self.embed_tokens, self.mtp_embed_tokens) if t is not None]

    def tie(self) -> None:
        """Make modules that share a weight share one Parameter; repeat after reallocating it."""
        if self.model.untie_embeddings_and_output_weights or self.lm_head is None:
            return
        if self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight
        if self.mtp_embed_tokens is not None:
            self.mtp_embed_tokens.weight = self.lm_head.weight

    @property
    def blocks(self) -> list[LayerBlock]:
        """All its attention and MLP modules, including shared experts."""
        return [module for module in self.modules() if isinstance(module, LayerBlock)]

    def forward(
        self,
        x_TH: Tensor | None,
        batch: Batch,
        sequence: KeysAndValues | None = None,
        routing: Decisions | None = None,
    ) -> Tensor:
        """Hidden states [T, H] of the stage, or the summed loss (a scalar) if it holds the head.

        With multi-token prediction: the states of all depths, concatenated [(1 + depths) T, H], or
        the losses of all depths [1 + depths].

        Args:
            x_TH: output of the previous stage; None for the stage with the embedding.
            batch: the microbatch, or a sequence slice of it.
            sequence: keys and values that the slices of the microbatch share in this stage.
            routing: router decisions by layer, which a recomputed forward reuses.
        """
        states = self._states(*self._run_layers(x_TH, batch, sequence, routing), batch)
        if self.parts.head:
            return self.loss(_for_head(self.model, states), batch)
        return states[0] if len(states) == 1 else torch.cat(states)

    def logits(self, batch: Batch, sequence: KeysAndValues | None = None) -> Tensor:
        """Logits [T, V] over the padded vocabulary; the stage must be the whole model."""
        assert self.lm_head is not None, "the last stage has the head"
        states = self._states(*self._run_layers(None, batch, sequence, None), batch)
        (logits_TV,) = self.column(_for_head(self.model, states[:1])[0], self.lm_head)
        return capped(logits_TV, self.model.final_logit_softcapping)

    def loss(self, states: Sequence[Tensor], batch: Batch) -> Tensor:
        """Sum of the weighted token losses from what the head reads [T, H]; one sum per depth."""
        self.z_sums.clear()
        losses = [
            self.head_loss(self, state_TH, labels_T, weights_T)
            for state_TH, (labels_T, weights_T) in zip(states, targets(batch), strict=True)
        ]
        return losses[0] if len(losses) == 1 else torch.stack(losses)

    @property
    def loss_rule(self) -> LossRule:
        """How losses are computed from logits; z-loss applies to training, not to evaluations."""
        model, settings = self.model, self.settings
        z_coeff = settings.z_loss_coeff if self.training else 0.0
        cap = model.final_logit_softcapping
        return LossRule(model.vocab_size, settings.label_smoothing, z_coeff, cap)

    def objective(self, losses: Tensor) -> Tensor:
        """The scalar to differentiate, from the result of `loss`, possibly scaled."""
        return objective(losses, self.settings.mtp_loss_scaling_factor)

    def _run_layers(
        self,
        x_TH: Tensor | None,
        batch: Batch,
        sequence: KeysAndValues | None,
        routing: Decisions | None,
    ) -> tuple[Tensor, Context]:
        """Embedding (if held) and layers: hidden states [T, H] before the final norm."""
        dropout = self._dropout(batch)
        if self.embed_tokens is not None:
            x_TH = self._embed(batch, dropout)
        assert x_TH is not None, "a stage without the embedding needs the hidden states before it"
        context = _context(self, batch, x_TH.dtype, dropout, sequence, routing)
        return self.through([*self.layers.values()], x_TH, context), context

    def _states(self, x_TH: Tensor, context: Context, batch: Batch) -> list[Tensor]:
        """Hidden states [T, H] after the final norm: of the model, then of each depth."""
        if self.norm is None:
            return list(x_TH.chunk(1 + batch.mtp_depth)) if self.parts.head else [x_TH]
        states = [self.norm(x_TH)]
        if batch.mtp_tokens is not None:
            (table,), rate = self.embeddings, self.model.embedded_dropout
            depths = iter(range(self.parts.mtp))
            for predict in self.predictions:
                runs = islice(depths, self.parts.mtp // len(self.predictions))
                embedded = []
                for depth in runs:
                    next_TH = table(batch.mtp_tokens[depth].flatten())
                    site = f"mtp.{depth}.embedding"
                    embedded.append(_dropped_at(site, next_TH, context.dropout, rate))
                through = self.through
                states += predict(states[-1], *embedded, context=context, through=through)
        return states

    def _embed(self, batch: Batch, dropout: Dropout | None) -> Tensor:
        assert self.embed_tokens is not None
        x_TH: Tensor = self.embed_tokens(batch.tokens.flatten())
        if self.embed_positions is not None:
            rows_T = _position_rows(self.model, self.shard_tokens(batch.positions.flatten()))
            x_TH = x_TH + self.embed_positions(rows_T)
        x_TH = _dropped_at("embedding", self.embed_norm(x_TH), dropout, self.model.embedded_dropout)
        return as_if_trained(x_TH)

    def _dropout(self, batch: Batch) -> Dropout | None:
        if not (self.training and (self.model.drops or self.jitters)):
            return None
        ids_T = batch.own_token_ids.flatten()
        rows = self.shard_tokens(ids_T), ids_T
        return Dropout(self.settings.seed, batch.step, *rows, batch.token_ids, self.fuses_dropout)


def _position_table(model: ModelConfig, parts: StageParts) -> Embedding | None:
    learned = parts.embedding and model.position_embedding_type == "learned_absolute"
    return Embedding(model.position_rows, model.hidden_size) if learned else None


def _position_rows(model: ModelConfig, positions_T: Tensor) -> Tensor:
    """Rows of the table; without an offset the batch's own positions, which backwards share."""
    first = model.position_embedding_offset
    return positions_T + first if first else positions_T


def _embedding_norm(model: ModelConfig, parts: StageParts) -> nn.Module:
    normed = parts.embedding and model.embed_layernorm
    return make_norm(model) if normed else nn.Identity()


def with_own_losses(stage: Stage) -> list[Router | Indexer]:
    """Modules of a stage that have losses of their own, which are means over the global batch."""
    return [module for module in stage.modules() if isinstance(module, Router | Indexer)]


def _layers_of(model: ModelConfig, depth: int, experts: ExpertsConfig) -> nn.Module:
    """What a multi-token prediction module runs between its projection and its norm."""
    numbers = prediction_prefixes(model, depth).values()
    layers = [TransformerLayer(model, number, experts) for number in numbers]
    return layers[0] if model.mtp_hybrid_override_pattern is None else MTPLayers(layers)


def _context(
    stage: Stage,
    batch: Batch,
    dtype: torch.dtype,
    dropout: Dropout | None,
    sequence: KeysAndValues | None,
    routing: Decisions | None,
) -> Context:
    """What the layers of a stage need to know about a microbatch."""
    model = stage.model
    routes = model.num_experts is not None
    return Context(
        len(batch.tokens),
        stage.rotary.tables(batch.positions, dtype, stage.fuses_rope),
        batch.packing,
        dropout,
        batch.part,
        sequence,
        Decisions() if routing is None else routing,
        stage.shard_tokens(batch.own_token_ids.flatten()) if routes else None,
        batch.token_ids[:, 0],
        batch.step,
        chunks=batch.chunks_of(model.attention_chunk_size),
        documents=batch.recurrence if has_linear(model, stage.parts) else None,
        temperature=_temperature(stage, batch.positions, dtype),
        noted=stage.noted,
    )


def _temperature(stage: Stage, positions_BS: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Factors of queries by position, if any layer of the stage uses them."""
    tempered = tempers(stage.model, stage.parts)
    return temperature(stage.model, positions_BS, dtype) if tempered else None


def _for_head(model: ModelConfig, states: list[Tensor]) -> list[Tensor]:
    """The input of the output layer; the division happens here, where there are fewer numbers than
    logits."""
    by = model.logits_scaling
    return states if by == 1.0 else [state_TH / by for state_TH in states]


HeadLoss = Callable[[Stage, Tensor, Tensor, Tensor | None], Tensor]
"""(stage, normed states [T, H], labels [T], weights [T]) -> summed loss."""


def plain_head_loss(
    stage: Stage, x_TH: Tensor, labels_T: Tensor, weights_T: Tensor | None
) -> Tensor:
    """Logits, then their loss; replaced by losses that keep no logits."""
    assert stage.lm_head is not None, "the last stage has the head"
    (logits_TV,) = stage.column(x_TH, stage.lm_head)
    return stage.cross_entropy(logits_TV, labels_T, stage.loss_rule, weights_T, stage.z_sums)
