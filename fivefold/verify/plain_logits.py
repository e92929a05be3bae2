"""The largest attention logits of one device, by definition, and what QK-clip does with them.

All S x S logits are held, since verified models are small.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.model.attention.grouped_query import AttentionBlock, Scope
from fivefold.model.transformer import Stage


class LogitWatch:
    """Observes the queries and keys of a plain model's attention, if its configuration needs them.

    Args:
        model: the model.
        config: its configuration.
    """

    def __init__(self, model: Stage, config: Config) -> None:
        self._config, self._seen = config.optimizer, dict[str, list[Tensor]]()
        self._models: dict[str, ModelConfig] = {}
        if not config.optimizer.notes_logits:
            return
        for name, block in model.named_modules():
            if isinstance(block, AttentionBlock):
                block.kernel = self._watched(name, block.kernel)
                self._models[name] = block.model

    def taken(self) -> dict[str, Tensor]:
        """The largest logit of each head since the last call, [N] by the name of its block."""
        found = {name: torch.stack(each).amax(0) for name, each in self._seen.items()}
        self._seen = {}
        return found

    @torch.no_grad()
    def clip(self, weights: Mapping[str, Tensor], logits: Mapping[str, Tensor]) -> None:
        """Scale the weights of queries and keys, head by head.

        Args:
            weights: weights by name.
            logits: as `taken` gave them.
        """
        limit, alpha = self._config.qk_clip_threshold, self._config.qk_clip_alpha
        for name, largest_N in logits.items():
            model = self._models[name]
            of = {n.removeprefix(f"{name}."): w for n, w in weights.items() if n.startswith(name)}
            shared = _shared(model)
            for head in range(0, len(largest_N), shared):
                most = float(largest_N[head : head + shared].max())
                if most > limit:
                    clip = _clip_latent if model.multi_latent_attention else _clip_group
                    clip(of, head, limit / most, alpha, model)

    def _watched(self, name: str, kernel: Any) -> Any:
        def watching(q: Tensor, k: Tensor, v: Tensor, scope: Scope, drop: Any) -> Tensor:
            self._seen.setdefault(name, []).append(largest_logits(q.detach(), k.detach(), scope))
            out: Tensor = kernel(q, k, v, scope, drop)
            return out

        return watching


def largest_logits(q_BSND: Tensor, k_BSGD: Tensor, scope: Scope) -> Tensor:
    """The largest logit of each query head, [N], over whole rows."""
    wide = torch.promote_types(q_BSND.dtype, torch.float32)
    shared = q_BSND.shape[2] // k_BSGD.shape[2]
    k_BSND = k_BSGD.repeat_interleave(shared, dim=2).to(wide)
    scale = scope.scores.factor(q_BSND.shape[3])
    logits = torch.einsum("bind,bjnd->bnij", q_BSND.to(wide) * scale, k_BSND)
    place = torch.arange(q_BSND.shape[1], device=q_BSND.device)
    behind = place[:, None] - place
    seen = (behind >= 0)[None]
    if scope.window is not None:
        seen = seen & (behind <= scope.window)
    if scope.documents is not None:
        seen = seen & (place >= scope.documents.begins_BL[:, :, None])
    return logits.masked_fill(~seen[:, None], float("-inf")).amax((0, 2, 3))


def largest_of(logits: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest of all logits; None if there are none."""
    return {"max_attention_logit": float(max(map(torch.max, logits.values())))} if logits else {}


def _shared(model: ModelConfig) -> int:
    """Number of query heads that share a key head."""
    latent = model.multi_latent_attention
    return 1 if latent else model.num_attention_heads // model.num_kv_heads


def _clip_group(
    of: Mapping[str, Tensor], head: int, share: float, alpha: float, model: ModelConfig
) -> None:
    """Clip the query heads from `head` on that share a key head, and that key head."""
    D, each = model.query_dim, model.query_outputs // model.num_attention_heads
    for query in range(head, head + _shared(model)):
        of["q_proj.weight"][query * each : query * each + D] *= share**alpha
    group = head // _shared(model)
    of["k_proj.weight"][group * D : (group + 1) * D] *= share ** (1 - alpha)


def _clip_latent(
    of: Mapping[str, Tensor], head: int, share: float, alpha: float, model: ModelConfig
) -> None:
    plain, rotary = model.qk_head_dim, model.qk_pos_emb_head_dim
    query = of["q_proj.weight" if model.q_lora_rank is None else "q_b_proj.weight"]
    rows = query[head * (plain + rotary) : (head + 1) * (plain + rotary)]
    rows[:plain] *= share**alpha
    rows[plain:] *= share
    pair = plain + model.v_head_dim
    of["kv_b_proj.weight"][head * pair : head * pair + plain] *= share ** (1 - alpha)
