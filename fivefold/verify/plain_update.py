"""The update of one device: torch's AdamW, Muon on whole matrices, and the rounding of narrow
states."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.training import OptimizerConfig
from fivefold.description.shape import is_layer_matrix, stage_weights
from fivefold.optim.eight_bit import FORMATS
from fivefold.optim.muon import orthogonalised, update_factor
from fivefold.optim.rounding import MOMENTS, NamedElements, rounded
from fivefold.optim.schedule import rates

ENDS = ("embed_tokens.weight", "lm_head.weight")
"""Weights of the whole model that have a learning rate of their own."""


class PlainUpdate:
    """Updates the weights of a whole model.

    All numbers have the type of the weights, even where a run keeps them in fewer bits.

    Args:
        weights: trained weights by name.
        config: configuration.
        dtype: compute dtype of the model.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Config, dtype: torch.dtype) -> None:
        self._weights, self._config, self._dtype = weights, config, dtype
        self._means = _means(weights, config)
        others = {name: weight for name, weight in weights.items() if name not in self._means}
        self._adamw = _adamw(others, config.optimizer)

    def step(self, grads: Mapping[str, Tensor], norm: float, step: int) -> None:
        """Clip gradients by their norm, and update the weights.

        Args:
            grads: gradients by name.
            norm: their norm.
            step: number of the step, from 0.
        """
        settings = self._config.optimizer
        limit = settings.clip_grad
        factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        for name, weight in self._weights.items():
            weight.grad = (grads[name] * factor).to(weight.dtype)
        lr, of_ends, decay = rates(step, settings, self._config.training)
        for group in self._adamw.param_groups:
            group["lr"] = of_ends if group["named"] in ENDS else lr
            group["weight_decay"] = decay if group["decays"] else 0.0
        self._adamw.step()
        for name in self._means:
            self._orthogonal_step(name, lr, decay)
        self._round_state(step)

    def _orthogonal_step(self, name: str, lr: float, decay: float) -> None:
        settings, mean = self._config.optimizer, self._means[name]
        weight, grad = self._weights[name].data, self._weights[name].grad
        assert grad is not None
        momentum = settings.muon_momentum
        mean.mul_(momentum).add_(grad, alpha=1 - momentum)
        ahead = momentum * mean + (1 - momentum) * grad if settings.muon_nesterov else mean
        dtype = torch.bfloat16 if self._dtype.itemsize == 2 else weight.dtype
        update = orthogonalised(ahead, settings.muon_num_ns_steps, dtype).to(weight.dtype)
        length = lr * update_factor(weight.shape, settings)
        weight.mul_(1 - lr * decay).sub_(update, alpha=length)

    @torch.no_grad()
    def _round_state(self, step: int) -> None:
        """Round moments, and bf16 weights, to what their storage can hold."""
        settings = self._config.optimizer
        types = settings.moment_types
        rounds = settings.main_params_dtype == "bf16" and self._dtype == torch.bfloat16
        if types == ("fp32", "fp32") and not rounds:
            return
        for name, weight in self._weights.items():
            whole = tuple(slice(0, size) for size in weight.shape)
            place = NamedElements(self._config.training.seed, name, tuple(weight.shape), whole)
            bits = place.random(step, weight.device)(slice(None))
            if rounds:
                rows = place.rows(weight.data)
                rows.copy_(rounded(rows, bits >> 32))
            for moment, kind, own in zip(MOMENTS, types, (bits, bits >> 16), strict=True):
                wide = place.rows(self._adamw.state[weight][moment])
                if kind == "bf16":
                    wide.copy_(rounded(wide, own))
                elif kind == "fp8" and weight.ndim > 1:
                    form = FORMATS[moment]
                    wide.copy_(form.unpack(*form.pack(wide, own)))


def _means(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The means of gradients, initially zero, of the matrices that Muon updates."""
    if config.optimizer.optimizer != "muon":
        return {}
    every = stage_weights(config.model)
    return {
        name: torch.zeros_like(weight)
        for name, weight in weights.items()
        if is_layer_matrix(name, every[name])
    }


def _adamw(weights: Mapping[str, Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """An AdamW parameter group for each weight."""
    groups = [
        {"params": [weight], "named": name, "decays": decays}
        for name, weight in weights.items()
        for decays in [weight.ndim > 1 and not name.endswith(".bias")]
    ]
    return torch.optim.AdamW(
        groups or [{"params": [], "named": "", "decays": False}],  # Muon may update all parameters
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        foreach=False,
        fused=False,
    )
