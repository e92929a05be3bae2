"""A plan as a value for JSON."""

from typing import Any

from fivefold.config.config import SETTINGS, Config
from fivefold.predict.times.kernels import KernelKind, kernels
from fivefold.search.candidate import Candidate
from fivefold.search.request import ASSUMABLE, FIXABLE
from fivefold.search.search import SearchResult
from fivefold.tell.describe import summary
from fivefold.tell.explain import alternatives, binding, sensitivities
from fivefold.tell.report import CONVENTION, cost


def as_json(result: SearchResult, tokens: float | None, most: int) -> dict[str, Any]:
    """All figures of the report, in seconds, bytes and shares of 1."""
    request, found = result.request, cost(result, tokens)
    kept = found.goodput
    return {
        "conventions": CONVENTION,
        "cluster": {"gpu": request.cluster.gpu.name, "gpus": request.world},
        "assumed": list(request.assumed),
        "fixed": {name: _plain(value) for name, value in request.fixed().items()},
        "search": {
            "legal": result.legal,
            "bounded": result.bounded,
            "too_large": result.too_large,
            "timed": result.timed,
            "looked_at": result.looked_at,
            "gap": result.gap,
            "seconds": result.seconds,
        },
        "layouts": [_candidate(candidate) for candidate in result.by_mesh()[:most]],
        "binding": binding(result),
        "kernels": [
            {**vars(kind), "share_of_peak": kind.share_of_peak, "excess": kind.excess}
            for kind in _kernels_of(result.best)
        ],
        "not_chosen": [
            {**_candidate(a.candidate), "because": a.reason} for a in alternatives(result)
        ],
        "sensitivities": [
            {
                "change": change.change,
                "step_seconds": change.seconds,
                "layout": summary(change.candidate.layout),
                "another_layout": change.moves,
                "untrained": change.untrained,
            }
            for change in sensitivities(result)
        ],
        "pareto": [_candidate(candidate) for candidate in result.pareto()],
        "run": {
            "tokens": found.tokens,
            "steps": found.steps,
            "seconds": found.seconds,
            "seconds_with_failures": found.wall,
            "gpu_hours": found.gpu_hours,
            "price": found.price,
            "goodput": kept and kept.share,
            "seconds_between_failures": kept and kept.mtbf,
            "seconds_between_checkpoints": kept and kept.interval,
        },
    }


def compared(result: SearchResult, other: Candidate | None) -> dict[str, Any]:
    """Another layout compared with the best; None: nothing fits."""
    if other is None:
        return {"layout": None}
    return {**_candidate(other), "slower": other.seconds / result.best.seconds - 1}


def _kernels_of(best: Candidate) -> list[KernelKind]:
    made = best.prediction
    return [] if made is None else kernels(made)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    prediction, memory = candidate.prediction, candidate.memory
    found: dict[str, Any] = {
        "layout": summary(candidate.layout),
        "settings": layout_settings(candidate.layout.config),
        "memory_bytes": memory.device_total,
        "capacity_bytes": memory.capacity,
        "host_bytes": memory.host,
        "disk_bytes": memory.disk,
        "fits": memory.fits,
        "memory_by_rank": [{"peak": rank.peak, **rank.parts} for rank in memory.ranks],
    }
    if prediction is None:
        return found | {"step_seconds_at_least": candidate.bound}
    return found | {
        "step_seconds": prediction.step_time,
        "interval_80": [prediction.low, prediction.high],
        "mfu": prediction.mfu,
        "model_flops": prediction.model_flops,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "parts": {part.name: part.seconds for part in prediction.parts},
    }


def layout_settings(config: Config) -> dict[str, Any]:
    """The layout's settings that are not their defaults, by field name."""
    values = {name: config.value(name) for name in sorted(FIXABLE | ASSUMABLE)}
    return {name: _plain(v) for name, v in values.items() if v != SETTINGS[name].default}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
