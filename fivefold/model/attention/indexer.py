"""The lightning indexer of DeepSeek Sparse Attention: scores which tokens a query should attend to.

A few small heads whose queries come from attention's query latent, and one key of each token; the
score of a key is the sum of the heads' positive products, each times a weight that the token of the
query gives the head. It reads hidden states and latents without passing gradients to them. The
release turns queries and keys by a Hadamard matrix, which changes no product and spreads what is
rounded to 8 bits; here nothing is.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.model.attention.sparse import ChoiceSettings, Index, IndexerTraining, SomeQueries
from fivefold.model.context import Context
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.norms import LayerNorm, key_norm

Choice = Callable[["Indexer", Context, Tensor, SomeQueries], Tensor]
"""Chooses keys for some queries, given their scores [B, q, L]: bool of their shape."""


class Indexer(LayerBlock):
    """Projections, the norm of keys, and RoPE of the first features of both.

    Every tensor-parallel rank holds all of it, and projects its own tokens.

    Attributes:
        loss_scale: factor of the loss in its gradients, scalar; None: 1.
        global_batch_size: rows of the step over all ranks, as `begin_step` was told.
        choice: seam for what it decides; None: the best scores.
    """

    compiles = False

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        shape, hidden = model.indexer, model.hidden_size
        self.wq_b = Linear(model.q_lora_rank or hidden, shape.size)
        self.wk = Linear(hidden, shape.dim)
        self.k_norm: LayerNorm = key_norm(model, shape.dim)
        self.weights_proj = Linear(hidden, shape.heads)
        self.model, self.layer = model, layer
        self.loss_scale: Tensor | None = None
        self.global_batch_size = 1
        self.choice: Choice | None = None

    def number(self, context: Context) -> int:
        """The layer that it belongs to, counting layers with shared weights separately."""
        return self.layer + context.shift

    def begin_step(self, global_batch_size: int) -> None:
        """Begin a step of this many rows over all ranks."""
        self.global_batch_size = global_batch_size

    def forward(self, x_TH: Tensor, query_TQ: Tensor, context: Context) -> Index:
        """The indexer's queries, keys and weights for the tokens of a microbatch.

        Args:
            x_TH: hidden states of this rank's tokens.
            query_TQ: what attention's queries are projected from.
            context: context of the microbatch.
        """
        heads, turned = self.model.indexer.heads, context.rotary[False]
        x_TH, query_TQ = x_TH.detach(), query_TQ.detach()
        (q_TF,) = self.whole(query_TQ, self.wq_b)
        k_TD, w_TI = self.whole(x_TH, self.wk, self.weights_proj)
        both = self.spread(torch.cat((self.k_norm(k_TD), w_TI), dim=1))
        k_TD, w_TI = both.split([self.model.indexer.dim, heads], dim=1)
        q_BSID = turned.rotate(context.by_rows(self.spread(q_TF), heads))
        k_BSD = turned.rotate(context.by_rows(k_TD.contiguous(), 1))[:, :, 0]
        if context.sequence is not None:
            site = f"layers.{self.layer}.self_attn.indexer"
            key = k_BSD[:, :, None]  # of one head, without values
            k_BSD = context.sequence.join(site, key, key[..., :0])[0][:, :, 0]
        w_BSI = context.by_rows(w_TI.contiguous(), 1)[:, :, 0]
        training = self._training(len(w_TI), context)
        shape = self.model.indexer
        instead = None if self.choice is None else partial(self.choice, self, context)
        rule = ChoiceSettings(heads, shape.topk, shape.size**-0.5, training, instead)
        return Index(q_BSID, k_BSD, w_BSI, rule)

    def _training(self, tokens: int, context: Context) -> IndexerTraining | None:
        """Each token of the global batch counts the same, whatever its label, as in Megatron-LM."""
        model, factor = self.model, self.model.dsa_indexer_loss_coeff
        if not (factor and self.training and torch.is_grad_enabled()):
            return None
        return IndexerTraining(
            factor / (context.row_length(tokens) * self.global_batch_size),
            model.dsa_indexer_use_sparse_loss,
            self.loss_scale,
            model.num_attention_heads,
            self.summed,
            context.noted,
        )
