"""The transformer, cut into stages: plain single-device code with seams for parallelism.

Hidden states are [T, H] with T = B * S tokens, row after row. Parameters have the names of the
whole model (`layers.17.self_attn.q_proj.weight`) in whichever stage they are.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.model.attention import Attention, AttentionBlock
from fivefold.model.batch import Batch
from fivefold.model.context import Context
from fivefold.model.description import layer_kind
from fivefold.model.dropout import Dropout
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import LatentAttention
from fivefold.model.layers import (
    Column,
    Embedding,
    LayerBlock,
    LayerNorm,
    Linear,
    RMSNorm,
    make_norm,
    plain_column,
)
from fivefold.model.loss import cross_entropy
from fivefold.model.mlp import MLP
from fivefold.model.rope import RotaryTables
from fivefold.model.routing import Decision
from fivefold.model.sequence_slices import SlicedSequence
from fivefold.model.shape import StageParts, whole_model

Norm = Callable[[Tensor], Tensor]


class NormedBlock(Protocol):
    """A module on the output of a norm, [T, H] -> [T, H]; `rest` are its further arguments."""

    def __call__(self, norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
        """[T, H] -> [T, H]."""


def plain_block(norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
    """One after the other: the seam of what recomputation discards."""
    made_TH: Tensor = module(norm(x_TH), *rest)
    return made_TH


def make_attention(model: ModelConfig, layer: int) -> AttentionBlock:
    """The attention of a layer, by the model's description."""
    return (LatentAttention if model.multi_latent_attention else Attention)(model, layer)


def make_mlp(
    model: ModelConfig, layer: int, experts: ExpertsConfig, global_batch_size: int
) -> LayerBlock:
    """What follows attention in a layer, by the layer's kind."""
    if layer_kind(model, layer).experts:
        return MoE(model, layer, experts, global_batch_size)
    return MLP(model, model.ffn_size)


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    Attributes:
        block: seam around a norm and the module behind it.
    """

    def __init__(
        self, model: ModelConfig, layer: int, experts: ExpertsConfig, global_batch_size: int
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(model)
        self.self_attn = make_attention(model, layer)
        self.post_attention_layernorm = make_norm(model)
        self.mlp = make_mlp(model, layer, experts, global_batch_size)
        self.dropout = model.hidden_dropout
        self.side_by_side = model.parallel_residual
        self.site = f"layers.{layer}"
        self.block: NormedBlock = plain_block

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        attended_TH = self.block(self.input_layernorm, self.self_attn, x_TH, context)
        sum_TH = x_TH + self._drop(attended_TH, context, f"{self.site}.self_attn")
        read_TH = x_TH if self.side_by_side else sum_TH
        made_TH = self.block(self.post_attention_layernorm, self.mlp, read_TH, context)
        return sum_TH + self._drop(made_TH, context, f"{self.site}.mlp")

    def _drop(self, x_TH: Tensor, context: Context, site: str) -> Tensor:
        if context.dropout is None or self.dropout == 0.0:
            return x_TH
        return context.dropout.hidden(x_TH, self.dropout, site)


Through = Callable[[Sequence[nn.Module], Tensor, Context], Tensor]
"""The layers of a stage, [T, H] -> [T, H]."""


def plain_layers(layers: Sequence[nn.Module], x_TH: Tensor, context: Context) -> Tensor:
    """One after the other: the seam of layers that are recomputed."""
    for layer in layers:
        x_TH = layer(x_TH, context)
    return x_TH


class Stage(nn.Module):
    """A contiguous piece of the model, with children only for what it holds.

    Tied embeddings: a stage that holds both ends shares one Parameter between `embed_tokens` and
    `lm_head`; otherwise the last stage owns a copy (see `shape.canonical_name`).

    Attributes:
        column: seam around the output layer.
        through: seam around the layers.
        head_loss: seam around output layer and loss together.
        cross_entropy: seam around the loss, with the signature of `loss.cross_entropy`.
        shard_tokens: seam that keeps this rank's part of [T] values beside the residual stream.
    """

    embed_tokens: Embedding | None
    embed_positions: Embedding | None
    norm: LayerNorm | RMSNorm | None
    lm_head: Linear | None

    def __init__(
        self,
        model: ModelConfig,
        parts: StageParts | None = None,
        *,
        seed: int = 0,
        label_smoothing: float = 0.0,
        experts: ExpertsConfig | None = None,
        global_batch_size: int = 1,
    ) -> None:
        super().__init__()
        parts = parts or whole_model(model)
        vocab, hidden = model.padded_vocab_size, model.hidden_size
        learned = parts.embedding and model.position_embedding_type == "learned_absolute"
        self.embed_tokens = Embedding(vocab, hidden) if parts.embedding else None
        self.embed_positions = Embedding(model.max_position_embeddings, hidden) if learned else None
        rules = experts or ExpertsConfig(), global_batch_size
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(model, i, *rules) for i in parts.layers}
        )
        self.norm = make_norm(model) if parts.head else None
        self.lm_head = Linear(hidden, vocab) if parts.head else None
        tied = not model.untie_embeddings_and_output_weights
        if tied and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight
        self.model, self.parts = model, parts
        self.seed, self.label_smoothing = seed, label_smoothing
        self.jitters = rules[0].moe_input_jitter_eps is not None
        self.column: Column = plain_column
        self.through: Through = plain_layers
        self.head_loss: HeadLoss = plain_head_loss
        self.cross_entropy: Callable[..., Tensor] = cross_entropy
        self.shard_tokens: Callable[[Tensor], Tensor] = lambda values_T: values_T

    @property
    def transformer_layers(self) -> list[TransformerLayer]:
        """All layers that it holds, in the order in which they run."""
        layers: list[Any] = [*self.layers.values()]
        return layers

    @property
    def mixtures(self) -> list[MoE]:
        """All mixtures of experts that it holds."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    @property
    def blocks(self) -> list[LayerBlock]:
        """All attentions and MLPs that it holds, shared experts included."""
        return [module for module in self.modules() if isinstance(module, LayerBlock)]

    def forward(
        self,
        x_TH: Tensor | None,
        batch: Batch,
        sequence: SlicedSequence | None = None,
        routing: dict[int, Decision] | None = None,
    ) -> Tensor:
        """The stage's hidden states [T, H], or the summed loss (a scalar) if it holds the head.

        Args:
            x_TH: what the stage before gave; None for the one that holds the embedding.
            batch: the microbatch, or a slice of it.
            sequence: what the slices of the microbatch share in this stage.
            routing: what its routers decide, by layer: found there when a forward is repeated.
        """
        x_TH = self.hidden(x_TH, batch, sequence, routing)
        return self.loss(x_TH, batch) if self.parts.head else x_TH

    def hidden(
        self,
        x_TH: Tensor | None,
        batch: Batch,
        sequence: SlicedSequence | None = None,
        routing: dict[int, Decision] | None = None,
    ) -> Tensor:
        """Embedding (if here) and layers: [T, H], before the final norm."""
        dropout = self._dropout(batch)
        if self.embed_tokens is not None:
            x_TH = self._embed(self.embed_tokens, batch, dropout)
        assert x_TH is not None, "a stage without the embedding needs the hidden states before it"
        rotary = None
        if self.model.position_embedding_type == "rope":
            rotary = RotaryTables.at(self.model, batch.positions, x_TH.dtype)
        context = Context(
            len(batch.tokens),
            rotary,
            batch.packing,
            dropout,
            batch.part,
            sequence,
            {} if routing is None else routing,
            self.shard_tokens(batch.own_token_ids.flatten()),
            batch.token_ids[:, 0],
            batch.step,
        )
        return self.through(self.transformer_layers, x_TH, context)

    def logits(self, x_TH: Tensor | None, batch: Batch) -> Tensor:
        """Logits [T, V] over the padded vocabulary, of the stage that holds the head."""
        return self._project(self.hidden(x_TH, batch))

    def loss(self, x_TH: Tensor, batch: Batch) -> Tensor:
        """Sum of the weighted token losses, from the last layer's hidden states."""
        assert self.norm is not None, "the last stage has the head"
        weights = batch.loss_weights
        return self.head_loss(
            self,
            self.norm(x_TH),
            batch.labels.flatten(),
            None if weights is None else weights.flatten(),
        )

    def _project(self, x_TH: Tensor) -> Tensor:
        assert self.norm is not None and self.lm_head is not None, "the last stage has the head"
        (logits_TV,) = self.column(self.norm(x_TH), self.lm_head)
        return logits_TV

    def _embed(self, embed_tokens: Embedding, batch: Batch, dropout: Dropout | None) -> Tensor:
        x_TH: Tensor = embed_tokens(batch.tokens.flatten())
        if self.embed_positions is not None:
            x_TH = x_TH + self.embed_positions(self.shard_tokens(batch.positions.flatten()))
        if dropout is not None and self.model.hidden_dropout > 0.0:
            x_TH = dropout.hidden(x_TH, self.model.hidden_dropout, "embedding")
        return x_TH

    def _dropout(self, batch: Batch) -> Dropout | None:
        model = self.model
        if not self.training or not (
            model.hidden_dropout or model.attention_dropout or self.jitters
        ):
            return None
        rows_T = self.shard_tokens(batch.own_token_ids.flatten())
        return Dropout(self.seed, batch.step, rows_T, batch.token_ids)


HeadLoss = Callable[[Stage, Tensor, Tensor, Tensor | None], Tensor]
"""Summed loss of a stage with the head, from normed states [T, H], labels [T] and weights [T]."""


def plain_head_loss(
    stage: Stage, x_TH: Tensor, labels_T: Tensor, weights_T: Tensor | None
) -> Tensor:
    """Logits, then their loss: the seam of losses that keep no logits."""
    assert stage.lm_head is not None, "the last stage has the head"
    (logits_TV,) = stage.column(x_TH, stage.lm_head)
    return stage.cross_entropy(
        logits_TV, labels_T, stage.model.vocab_size, stage.label_smoothing, weights_T
    )
