"""The main facts of runs."""

from collections.abc import Callable, Sequence

from fivefold.config.config import Config
from fivefold.description.shape import count_parameters
from fivefold.report.history import LAST, RunHistory, evaluated, validation_set
from fivefold.units import human_bytes, human_count, human_flops, human_seconds


def facts(histories: Sequence[RunHistory]) -> list[tuple[str, ...]]:
    """(name, value for each run) of the main facts, without those that no run has."""
    averaged = min(LAST, max((len(history.values("loss")) for history in histories), default=LAST))
    evaluations = [record for history in histories for record in history.evaluations]
    every: list[tuple[str, Callable[[RunHistory], str]]] = [
        ("model", _model),
        ("layout", lambda history: _layout(history.config)),
        ("steps", lambda history: f"{history.done:,} of {history.config.training.num_steps:,}"),
        ("tokens", lambda history: _formatted(_last(history, "tokens_total"), human_count)),
        (
            f"loss, mean of the last {averaged} steps",
            lambda s: _formatted(s.latest("loss"), _short),
        ),
        *(
            (f"lowest validation loss{validation_set(name)}", _best(name))
            for name in evaluated(evaluations)
        ),
        ("time of a step, median", lambda s: _formatted(s.usual("seconds"), human_seconds)),
        ("tokens/s, median", lambda s: _formatted(s.usual("tokens_per_second"), human_count)),
        (
            "speed of a rank, median",
            lambda s: _formatted(
                s.usual("flops_per_second_per_rank"), lambda flops: f"{human_flops(flops)}/s"
            ),
        ),
        ("MFU", lambda history: _formatted(history.usual("mfu"), lambda share: f"{share:.1%}")),
        ("peak memory, first rank", lambda s: _formatted(_last(s, "memory_bytes"), human_bytes)),
        ("time in steps", lambda history: human_seconds(history.step_seconds)),
        (
            "share of the time since the first start",
            lambda s: _formatted(s.goodput, lambda x: f"{x:.1%}"),
        ),
    ]
    rows = [(name, *(tell(history) for history in histories)) for name, tell in every]
    return [row for row in rows if any(row[1:])]


def _model(history: RunHistory) -> str:
    model = history.config.model
    kind = f", {model.num_experts} experts" if model.num_experts else ""
    size = human_count(count_parameters(model, padded=False).total)
    return f"{size} parameters: {model.num_layers} layers of {model.hidden_size:,}{kind}"


def _layout(config: Config) -> str:
    parallel = config.parallel
    degrees = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "ep": parallel.expert_model_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in degrees.items() if size > 1]
    split = " ".join(parts) or "no model parallelism"
    return f"{split}, {parallel.data_parallel_sharding_strategy}"


def _last(history: RunHistory, name: str) -> float | None:
    return next(reversed(history.values(name).values()), None)


def _best(name: str) -> Callable[[RunHistory], str]:
    def best(history: RunHistory) -> str:
        found = history.values(name, history.evaluations)
        if not found:
            return ""
        step = min(found, key=found.__getitem__)
        return f"{_short(found[step])} after step {step:,}"

    return best


def _formatted(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


def _short(value: float) -> str:
    return f"{value:.4f}"
