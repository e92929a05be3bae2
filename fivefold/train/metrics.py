"""The metrics of steps and evaluations, and the trackers that they can be sent to."""

import importlib
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fivefold.errors import ConfigError, Mistake


@dataclass(frozen=True)
class LayerRouting:
    """What the router of one layer decided in a step.

    Attributes:
        layer: number of the layer.
        counts: tokens that chose each expert, before any was dropped.
        dropped: share of the choices for which an expert had no room.
        aux_loss: sum of its auxiliary losses, their factors included.
        biases: lowest and highest bias of an expert before the step; (0, 0) without biases.
    """

    layer: int
    counts: tuple[float, ...]
    dropped: float
    aux_loss: float
    biases: tuple[float, float]

    @classmethod
    def of(cls, layer: int, row: Sequence[float]) -> "LayerRouting":
        """From a row of `Routers.sums`."""
        *counts, dropped, aux_loss, lowest, highest = row
        return cls(layer, tuple(counts), dropped / max(sum(counts), 1), aux_loss, (lowest, highest))

    @property
    def values(self) -> dict[str, Any]:
        """The fields of the layer in `metrics.jsonl`."""
        return {
            "tokens": [int(count) for count in self.counts],
            "dropped": self.dropped,
            "aux_loss": self.aux_loss,
            "biases": list(self.biases),
        }

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean."""
        return max(self.counts) * len(self.counts) / max(sum(self.counts), 1)


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step of the whole run.

    Attributes:
        loss: mean loss over the valid tokens of the global batch.
        grad_norm: norm of the global gradient before clipping.
        tokens: number of tokens of the global batch.
        tokens_total: number of tokens since the first step of the run.
        seconds: wall-clock time of the step, in seconds.
        flops: model FLOPs of the global batch, forward and backward, without recomputation.
        peak_flops: peak FLOP/s of one device; None if it is not known.
        memory_bytes: peak memory of this rank so far, in bytes.
        data_wait_seconds: part of `seconds` in which the step waited for its batch.
        extra: further scalars, shown only in the file and the trackers.
        routing: decisions of the routers of layers with experts.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_total: int
    seconds: float
    world_size: int
    flops: float
    peak_flops: float | None
    memory_bytes: int
    data_wait_seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)
    routing: tuple[LayerRouting, ...] = ()

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean, in the layer where that ratio is highest."""
        return max((layer.imbalance for layer in self.routing), default=1.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens_per_second / self.world_size

    @property
    def flops_per_second_per_rank(self) -> float:
        """Model FLOP/s of one rank."""
        return self.flops / self.seconds / self.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s divided by the device's peak, 0 to 1; None if the peak is not known."""
        return self.flops_per_second_per_rank / self.peak_flops if self.peak_flops else None

    @property
    def values(self) -> dict[str, float]:
        """Name -> scalar, as in `metrics.jsonl` and the trackers."""
        values: dict[str, float] = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "tokens_total": self.tokens_total,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_rank": self.tokens_per_second_per_rank,
            "flops_per_second_per_rank": self.flops_per_second_per_rank,
            "memory_bytes": self.memory_bytes,
            "data_wait_seconds": self.data_wait_seconds,
        }
        if self.mfu is not None:
            values["mfu"] = self.mfu
        if self.routing:
            values |= self._of_experts()
        return values | dict(self.extra)

    @property
    def record(self) -> dict[str, Any]:
        """`values`, and lists about the experts of each layer, as in `metrics.jsonl`."""
        layers = {str(layer.layer): layer.values for layer in self.routing}
        return {**self.values, "experts": layers} if layers else {**self.values}

    def _of_experts(self) -> dict[str, float]:
        return {
            "moe_imbalance": self.imbalance,
            "moe_drop_rate": sum(x.dropped for x in self.routing) / len(self.routing),
            "moe_aux_loss": sum(x.aux_loss for x in self.routing),
            "moe_bias_min": min(x.biases[0] for x in self.routing),
            "moe_bias_max": max(x.biases[1] for x in self.routing),
        }


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation: mean loss over `tokens` valid tokens, after optimizer step `step`.

    Attributes:
        name: name of the validation set; empty: the validation split of the corpus.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    name: str = ""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def record(self) -> dict[str, Any]:
        """The record in `metrics.jsonl`."""
        return {**self.values}

    @property
    def values(self) -> dict[str, float]:
        """Name -> scalar, as in `metrics.jsonl` and the trackers."""
        suffix = f"_{self.name}" if self.name else ""
        return {
            f"eval_loss{suffix}": self.loss,
            f"eval_perplexity{suffix}": self.perplexity,
            f"eval_tokens{suffix}": self.tokens,
            f"eval_seconds{suffix}": self.seconds,
        }


class Sink(Protocol):
    """A destination of metrics."""

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Take one step or evaluation."""

    def close(self) -> None:
        """Write out what is pending."""


class TensorBoard:
    """TensorBoard events in `folder`."""

    def __init__(self, folder: Path) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(str(folder))

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Take one step or evaluation."""
        for name, value in metrics.values.items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()


class WeightsAndBiases:
    """A run in a W&B project; a resumed run with the same `name` continues its curves."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], folder: Path, resume: bool = False
    ) -> None:
        self._run = importlib.import_module("wandb").init(
            project=project,
            name=name,
            id=name,
            config=dict(config),
            dir=str(folder),
            resume="allow" if resume else None,
        )

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Take one step or evaluation."""
        self._run.log(metrics.values, step=metrics.step)

    def close(self) -> None:
        """Write out what is pending."""
        self._run.finish()


def close_all(sinks: Iterable[Sink]) -> None:
    """Close every sink, also when one of them fails; the first failure is raised at the end."""
    first: Exception | None = None
    for sink in sinks:
        try:
            sink.close()
        except Exception as error:
            first = first or error
    if first:
        raise first


def check_installed(package: str, name: str, extra: str | None = None) -> None:
    """Check for an optional package without importing it; `extra` is its name among our extras, if
    it differs.

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # only a folder of that name, such as W&B's
        what = f"{name} is asked for, but {package} is not installed"
        raise ConfigError(Mistake(what, attempt=f'pip install "fivefold[{extra or package}]"'))
