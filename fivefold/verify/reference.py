"""The reference: the same training on one device, with the plain model, autograd and torch's AdamW.

It shares nothing with the parallel code but the model's arithmetic and its initial weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.tensor_file import write_tensors
from fivefold.config.config import Config
from fivefold.config.data import IGNORED
from fivefold.config.memory import MemoryConfig
from fivefold.data.packing import Microbatch
from fivefold.model.batch import Batch
from fivefold.model.eight_bit.delayed import DelayedScaling
from fivefold.model.eight_bit.layers import eight_bit, install_delayed, install_eight_bit
from fivefold.model.eight_bit.rules import ScaledLayer, delayed_linears
from fivefold.model.init import initialise
from fivefold.model.moe.routing import Decisions
from fivefold.model.prediction import valid_by_depth
from fivefold.model.transformer import Stage, with_own_losses
from fivefold.train.batches import as_batch
from fivefold.verify.batches import EVALUATION, global_batch, microbatches
from fivefold.verify.choices import ChoiceRecorder, Choices, follow
from fivefold.verify.plain_logits import LogitWatch, largest_of
from fivefold.verify.plain_update import PlainUpdate
from fivefold.verify.standing_in import in_order, round_gathered, scale_each_element, stand_in

Tensors = dict[str, Tensor]
Routing = dict[int, list[Tensor]]
"""Tokens of each expert in each microbatch, by layer."""
NAMED = ("grads", "before", "after", "choices")
"""Fields of a step with one tensor per name."""


@dataclass(frozen=True)
class ReferenceStep:
    """The results of one device in one step.

    Attributes:
        loss: mean loss over the valid tokens.
        norm: gradient norm before clipping.
        evaluation: loss of batch EVALUATION with the updated weights, without dropout; None after
            later steps than the first, where none is compared.
        further: mean losses of multi-token prediction, by name.
        losses: summed loss of each microbatch, [microbatches].
        loads: tokens that chose each expert, [layers with experts, microbatches, experts].
        grads: gradients by global name, before clipping.
        before: weights, biases of experts, and delayed scales, before the update.
        after: weights, biases of experts, and delayed scales, after the update.
        choices: what routers and indexers chose for each token of the step and of the evaluation;
            of a run that has followed another's, none.
    """

    loss: float
    norm: float
    evaluation: float | None
    further: dict[str, float]
    losses: Tensor
    loads: Tensor
    grads: Tensors
    before: Tensors
    after: Tensors
    choices: Choices


def plain_model(config: Config, dtype: torch.dtype) -> Stage:
    """The whole model without parallelism, with parameters in `dtype`."""
    training = config.training
    model = Stage(config.model, training=training, experts=config.experts)
    for module in with_own_losses(model):
        module.begin_step(training.global_batch_size)
    stand_in(model, config)
    products = eight_bit(training, dtype)
    if products is not None:
        install_eight_bit(model, products, MemoryConfig())
    scale_each_element(model, training)
    return model.to(dtype)


def delayed_scaling(model: Stage, config: Config) -> DelayedScaling:
    """The delayed scales that a plain model uses from now on; None without delayed scaling."""
    every = delayed_linears(config).items()
    layers = [ScaledLayer(name, 0, True, experts, 0, experts or 1) for name, experts in every]
    return install_delayed({0: model}, layers, config, torch.device("cpu"))


def run_reference(
    config: Config,
    steps: int,
    dtype: torch.dtype = torch.float64,
    followed: Sequence[ReferenceStep] = (),
) -> list[ReferenceStep]:
    """Train the plain model on `global_batch(config, 0 .. steps - 1)`.

    Args:
        config: configuration; its parallel section is used only where a rule of experts depends on
            it.
        steps: optimizer steps.
        dtype: compute dtype; of 16 bits, master weights are fp32, and in fp16 the loss is scaled.
        followed: steps in which routers and indexers choose as they did there; empty: by their own
            scores.
    """
    run = _PlainRun(config, dtype, followed)
    return [run.step(number) for number in range(steps)]


class _PlainRun:
    """The training of a plain model, step by step; arguments are those of `run_reference`."""

    def __init__(
        self, config: Config, dtype: torch.dtype, followed: Sequence[ReferenceStep]
    ) -> None:
        self._config, self._followed = config, followed
        self._master = _master(config, dtype)
        named = self._master.named_parameters()
        self._weights = {name: p for name, p in named if p.requires_grad}
        self._update = PlainUpdate(self._weights, config, dtype)
        self._model = self._master
        if dtype.itemsize == 2 or config.parallel.zero_quantized_weights:  # rounds the weights
            self._model = plain_model(config, dtype)
            self._model.load_state_dict(self._master.state_dict())
        self._scaling = delayed_scaling(self._model, config)
        round_gathered(self._model, config)
        self._watch = LogitWatch(self._model, config)
        self._recorder = None if followed else ChoiceRecorder(self._model)
        self._narrow = config.optimizer.narrow_gradients and dtype == torch.bfloat16
        scales = config.optimizer.loss_scales if dtype == torch.float16 else (1.0, 1.0)
        self._scale, self._least_scale = scales

    def step(self, number: int) -> ReferenceStep:
        """Run a step and return its results."""
        before = _state(self._master, self._scaling)
        batch = global_batch(self._config, number)
        depths = self._config.model.mtp_num_layers
        tokens = valid_by_depth(as_batch(batch, number, depths))
        self._scaling.begin()
        losses, grads, routing, noted = self._gradients(batch, tokens, number)
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        logits = self._watch.taken()
        self._take(grads, float(norm), routing, number, logits)
        further = {
            f"mtp_{depth}_loss": float(losses[:, depth].sum()) / max(tokens[depth], 1)
            for depth in range(1, len(tokens))
        }
        loads = [torch.stack(routing[layer]) for layer in sorted(routing)]
        return ReferenceStep(
            loss=float(losses[:, 0].sum()) / valid_tokens(batch),
            norm=float(norm),
            evaluation=_evaluate(self._model, self._config) if number == 0 else None,
            further=further | _of_indexers(self._config, noted) | largest_of(logits),
            losses=losses[:, 0],
            loads=torch.stack(loads) if loads else torch.zeros(0),
            grads=grads,
            before=before,
            after=_state(self._master, self._scaling),
            choices={} if self._recorder is None else self._recorder.taken(),
        )

    def _gradients(
        self, batch: Microbatch, tokens: Sequence[int], number: int
    ) -> tuple[Tensor, Tensors, Routing, Sequence[Tensor]]:
        """Losses, gradients, tokens per expert, and indexer losses; the loss scale is halved until
        no gradient overflows."""
        samples = microbatches(self._config, batch)
        while True:
            self._watch.taken()
            if self._followed:
                follow(self._model, self._followed[number].choices, torch.device("cpu"))
            routing: Routing = {}
            batches = batches_of(self._config, samples, number)
            losses, grads = gradients(
                self._model, batches, tokens, routing, narrow=self._narrow, scale=self._scale
            )
            noted = self._model.noted.take()
            finite = all(bool(grad.isfinite().all()) for grad in grads.values())
            if finite or self._scale <= self._least_scale:
                return losses, grads, routing, noted
            self._scale /= 2

    def _take(
        self, grads: Tensors, norm: float, routing: Routing, number: int, logits: Tensors
    ) -> None:
        """Update weights, expert biases and delayed scales."""
        self._update.step(grads, norm, number)
        if self._config.optimizer.qk_clip:
            self._watch.clip(self._weights, logits)
        for mixture in self._master.mixtures:
            counts = (routing[n] for n in self._model.model.layers_like(mixture.router.layer))
            mixture.router.update_bias(torch.stack([*chain(*counts)]).sum(0))
        if self._model is not self._master:
            self._model.load_state_dict(self._master.state_dict())
        round_gathered(self._model, self._config)
        self._scaling.agree(None)
        self._scaling.update()


def _of_indexers(config: Config, noted: Sequence[Tensor]) -> dict[str, float]:
    """The mean loss of the layers' indexers; None if there are none."""
    model = config.model
    if not model.trains_indexer:
        return {}
    return {"indexer_loss": float(torch.stack([*noted]).sum()) / model.num_all_layers}


def _master(config: Config, dtype: torch.dtype) -> Stage:
    """The plain model that is updated, with initial weights; `dtype`: that of computation."""
    master = plain_model(config, torch.float32 if dtype.itemsize == 2 else dtype)
    initialise(master, config.training.seed)
    for frozen in (p for p in master.parameters() if not p.requires_grad):
        frozen.copy_(frozen.to(dtype))  # frozen weights are kept in the compute type
    return master


def batches_of(config: Config, samples: Sequence[Microbatch], step: int) -> list[Batch]:
    """Microbatches as model inputs, with the tokens and labels of multi-token prediction."""
    return [as_batch(sample, step, config.model.mtp_num_layers) for sample in samples]


def gradients(
    model: Stage,
    batches: Sequence[Batch],
    tokens: Sequence[int],
    routing: Routing | None = None,
    *,
    narrow: bool = False,
    counted: Sequence[bool] | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensors]:
    """Summed losses [microbatches, 1 + D] in fp64, and the gradients of the training objective.

    Args:
        model: plain model.
        batches: microbatches, with D further tokens.
        tokens: for each of the 1 + D depths, the number that its loss is divided by.
        routing: receives the tokens of each expert in each microbatch, by layer.
        narrow: whether gradients are summed in their own type, not in fp32 at least.
        counted: the microbatches whose losses and gradients are wanted, where routers see the
            others, too; None: all.
        scale: factor of the objective while gradients are made, which are then divided by it.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _forget(trained)
    for module in with_own_losses(model):
        module.begin_step(module.global_batch_size)
        module.loss_scale = torch.tensor(scale)
    count = torch.tensor(tokens).clamp_min(1)
    count = count[0] if len(tokens) == 1 else count
    total = {
        name: torch.zeros_like(
            p, dtype=p.dtype if narrow else torch.promote_types(p.dtype, torch.float32)
        )
        for name, p in trained.items()
    }
    losses = []
    for number, batch in in_order(model, batches):
        decisions = Decisions()
        loss = model(None, batch, None, decisions)
        if routing is not None:
            for layer, decision in decisions.items():
                counts_E = decision.sums[: model.model.num_experts]
                routing.setdefault(layer, []).append(counts_E)
        if counted is not None and not counted[number]:
            continue
        (scale * model.objective(loss / count)).backward()
        losses.append(loss.detach().double().reshape(-1))
        for name, parameter in trained.items():
            if parameter.grad is not None:
                total[name] += parameter.grad
        _forget(trained)
    return torch.stack(losses), {name: grad / scale for name, grad in total.items()}


def _forget(trained: Mapping[str, Tensor]) -> None:
    for parameter in trained.values():
        parameter.grad = None


def valid_tokens(batch: Microbatch) -> int:
    """Number of labels with a loss."""
    return int((batch.labels_BS != IGNORED).sum())


def save_trace(path: Path, trace: Sequence[ReferenceStep]) -> None:
    """Write steps in a format that every rank can memory-map.

    Raises:
        OSError: the file system did not take them.
    """
    tensors: Tensors = {}
    numbers: list[dict[str, Any]] = [{} for _ in trace]
    for step, result in enumerate(trace):
        for field, value in vars(result).items():
            if isinstance(value, Tensor):
                tensors[f"{step}/{field}"] = value.contiguous()
            elif field in NAMED:
                for name, tensor in value.items():
                    tensors[f"{step}/{field}/{name}"] = tensor.contiguous()
            else:
                numbers[step][field] = value
    write_tensors(path, tensors, {"numbers": json.dumps(numbers)})


def load_trace(path: Path) -> list[ReferenceStep]:
    """Memory-map what `save_trace` wrote; the ranks of a machine share the memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = [{name: {} for name in NAMED} | of for of in json.loads(file.metadata()["numbers"])]
        names = file.keys()
        for key in names:
            step, field, *name = key.split("/", 2)
            if name:
                found[int(step)][field][name[0]] = file.get_tensor(key)
            else:
                found[int(step)][field] = file.get_tensor(key)
    return [ReferenceStep(**values) for values in found]


def _evaluate(model: Stage, config: Config) -> float:
    batch = global_batch(config, EVALUATION)
    model.eval()
    with torch.no_grad():
        losses = [
            model(None, as_batch(sample, 0)).double()  # no dropout: no step matters
            for sample in microbatches(config, batch)
        ]
    model.train()
    return float(torch.stack(losses).sum()) / valid_tokens(batch)


def _state(master: Stage, scaling: DelayedScaling) -> Tensors:
    """Copies of weights, biases of experts, and delayed scales."""
    scales = scaling.stored(copies=True).items()
    held = dict(master.state_dict()) | {name: piece.local.double() for name, piece in scales}
    return {name: weight.detach().clone() for name, weight in held.items()}
