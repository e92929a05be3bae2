"""transformers' models as an oracle: built from the same config.json, run in fp64 throughout."""

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.multimodal import is_multimodal, part_of, tensors_of, text_name
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.convert.load import fill_piece, places_in
from fivefold.description.shape import canonical_name
from fivefold.mesh.slices import piece_of
from fivefold.model.transformer import Stage
from tests.config.families import LENGTH
from tests.model.models import batch_of


class InFp64(TorchFunctionMode):
    """Makes fp64 of every fp32 that is asked for: norms, softmax and RoPE insist on it.

    So it does of products and quotients of whole numbers, which are fp32 unasked.
    """

    def __enter__(self) -> "InFp64":
        self._usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._usual)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow, wide = torch.float32, torch.float64
        if func is Tensor.float:
            func = Tensor.double
        args = [wide if value is narrow else value for value in args]
        if kwargs is None:
            return func(*args)
        named = {name: wide if value is narrow else value for name, value in kwargs.items()}
        return func(*args, **named)


def config_of(fields: Mapping[str, Any]) -> Any:
    """What transformers reads of a config.json; it has DeepSeek-V3 for Kimi-K2."""
    from transformers import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    kind = {"kimi_k2": "deepseek_v3"}.get(fields["model_type"], fields["model_type"])
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy({**fields, "model_type": kind}))


def oracle(fields: Mapping[str, Any], *, meta: bool = False) -> nn.Module:
    """transformers' causal language model of a config.json, with random fp64 weights.

    Raises whatever transformers raises for what it does not understand.
    """
    import transformers

    config = config_of(fields)
    kind = getattr(transformers, FAMILIES[fields["model_type"]].architecture)
    config._experts_implementation = "eager"
    if config.dtype is not None:  # in which tables of positions would be rounded
        config.dtype = torch.float64
    return built(kind, config, meta=meta)


def built(kind: Any, config: Any, *, meta: bool) -> nn.Module:
    """A class's model, with random fp64 weights instead of those with which it would begin."""
    from transformers.initialization import no_init_weights

    with torch.device("meta" if meta else "cpu"), InFp64(), no_init_weights():
        model = kind._from_config(config)
    model.tie_weights()
    return model if meta else _fill(model)


def _fill(model: nn.Module) -> nn.Module:
    model.double().eval()
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):  # which is rounded to fp32
            module.embed_scale.fill_(module.scalar_embed_scale)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))
        for name, buffer in model.named_buffers():
            if "score_correction" in name or name.endswith("expert_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def oracle_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [B * S, V]."""
    with torch.no_grad(), InFp64():
        made = model(tokens)
    return (made[0] if isinstance(made, tuple) else made.logits).flatten(0, 1)


def oracle_windows(model: nn.Module) -> list[int | None]:
    """Of each layer: tokens before itself that each token attends to; None: all."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    if hasattr(config, "attention_layers"):  # GPT-Neo's
        window, types = (
            config.window_size,
            [f"{kind}_attention" for kind in config.attention_layers],
        )
        return [window - 1 if kind == "local_attention" else None for kind in types]
    slides = [kind == "sliding_attention" and window is not None for kind in types]
    return [window - 1 if sliding else None for sliding in slides]


class _Saved:
    """A model's tensors, or what is like them, as in a folder into which transformers saves it."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self.path, self.fields = Path("oracle"), model.config.to_dict()
        self.how = tensors_of(self.fields)
        saved, whole = revert_weight_conversion(model, dict(tensors)), is_multimodal(self.fields)
        self._tensors = {
            text_name(name) if whole else name: tensor
            for name, tensor in saved.items()
            if not (whole and part_of(name))
        }
        self.names = {*self._tensors}

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][slices]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def fill(self, config: ModelConfig, ours: Mapping[str, Tensor]) -> None:
        """Fill tensors of ours, by name, as from files."""
        places = places_in(self, config)
        for name, tensor in ours.items():
            fill_piece(self, places[canonical_name(config, name)], piece_of(tensor))


def our_stage(config: ModelConfig, model: nn.Module) -> Stage:
    """This project's model with the weights of theirs, in fp64."""
    stage = Stage(config, training=TrainingConfig(seq_length=LENGTH)).double().eval()
    held = dict(stage.named_parameters()) | dict(stage.named_buffers())
    _Saved(model, model.state_dict()).fill(config, held)
    return stage


Rows = Sequence[Sequence[int]]
"""Lengths of the documents of each row."""
ONE: Rows = [[LENGTH]]


def our_logits(config: ModelConfig, model: nn.Module, rows: Rows = ONE) -> tuple[Tensor, Tensor]:
    """Tokens [B, S], and the logits [B * S, V] that this project's model gives with those
    weights."""
    batch = batch_of(config, rows)
    with torch.no_grad():
        logits = our_stage(config, model).logits(batch)
    return batch.tokens, logits[:, : config.vocab_size]


def assert_same(config: ModelConfig, model: nn.Module, rows: Rows = ONE) -> None:
    """Logits of this project's model are those of theirs, with its weights; so are the gradients
    of a random loss."""
    stage, batch = our_stage(config, model), batch_of(config, rows)
    logits = stage.logits(batch)[:, : config.vocab_size]
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    logits.backward(grad)
    with InFp64():
        expected = model(batch.tokens).logits.flatten(0, 1)
        expected.backward(grad)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    ours = dict(stage.named_parameters())
    true = {name: torch.zeros_like(p) for name, p in ours.items()}
    held = model.named_parameters()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in held}
    _Saved(model, model.state_dict() | grads).fill(config, true)
    learned = config.position_embedding_type == "learned_absolute"
    for name, wanted in true.items():
        # Where positions are learned a key's bias changes no score: its gradient is rounding.
        vanishes = learned and name.endswith("k_proj.bias")
        scale = true[name.replace("k_proj", "q_proj") if vanishes else name].abs().max()
        found = ours[name].grad
        if found is None:
            assert not wanted.any(), name
        else:
            assert (found - wanted).abs().max() <= 1e-12 * scale, name
