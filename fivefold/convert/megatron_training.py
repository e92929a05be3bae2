"""The position of a Megatron-LM job when it saved a checkpoint, and its optimizer state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config.model import ModelConfig
from fivefold.convert.megatron import MegatronFolder
from fivefold.convert.megatron_common import number_in, read_common
from fivefold.convert.megatron_tensors import MegatronTensors
from fivefold.convert.stored import Stored
from fivefold.description.shape import parameter_shapes
from fivefold.errors import CheckpointError, Mistake
from fivefold.optim.adamw import state_name
from fivefold.optim.loss_scale import ScaleState
from fivefold.optim.rounding import MOMENTS
from fivefold.units import few

WEIGHTS_ALONE = ("--finetune",)
_MASTERS = ("fp32_param", "param")
"""Names of the masters: of unsharded optimizers and older formats, and of those made anew whole."""
_WIDE = ("F32", "F64")
_TYPES = (*_WIDE, "BF16")
_SHOWN = 3


@dataclass(frozen=True)
class MegatronTraining:
    """The position of a Megatron-LM job.

    Attributes:
        step: updates that Adam had made.
        iteration: iterations, some of which may have made none; None: not stated.
        samples: samples consumed; None: not stated.
        counted_samples: samples that count for its learning rate; None: not stated.
        batch: samples of a step; None: not stated.
        seq_length: tokens of a sample; None: not stated.
        loss_scale: its dynamic loss scale; None: it had none.
    """

    step: int
    iteration: int | None
    samples: int | None
    counted_samples: int | None
    batch: int | None
    seq_length: int | None
    loss_scale: ScaleState | None


def keeps_training(folder: MegatronFolder) -> bool:
    """Whether a checkpoint has any optimizer state, in any format."""
    return bool(folder.states) or folder.in_buckets or "optimizer" in read_common(folder.path)


def training_in(folder: Path) -> MegatronTraining:
    """The position of the job that saved a checkpoint.

    Raises:
        CheckpointError: its common.pt cannot be read, or does not tell Adam's step.
    """
    common = read_common(folder)
    arguments, schedule = _dict(common.get("args")), _dict(common.get("opt_param_scheduler"))
    optimizers = [*_optimizers(common.get("optimizer"))]
    steps = {
        int(step)
        for each in optimizers
        for value in _steps(each)
        if (step := number_in(folder, value)) is not None and step > 0 and step == int(step)
    }
    if len(steps) != 1:
        what = f"{folder} does not tell how many updates Adam has made"
        if steps:
            what += f" of all weights alike, but {' and '.join(f'{s:,}' for s in sorted(steps))}"
        raise CheckpointError(Mistake(what, works=WEIGHTS_ALONE))
    return MegatronTraining(
        step=steps.pop(),
        iteration=_count(common.get("iteration")),
        samples=_count(arguments.get("consumed_train_samples")),
        counted_samples=_count(schedule.get("num_steps")),
        batch=_count(arguments.get("global_batch_size")),
        seq_length=_count(arguments.get("seq_length")),
        loss_scale=_loss_scale(folder, optimizers, _count(arguments.get("hysteresis"))),
    )


def training_sources(
    folder: MegatronFolder, model: ModelConfig
) -> dict[str, tuple[MegatronTensors, Stored]]:
    """Where each tensor of a run that resumes is stored: masters, buffers and moments by their
    names.

    Raises:
        CheckpointError: the weights are of another model; or the optimizer's state is none that is
            read: that of another optimizer, in buckets, incomplete, or of other types.
    """
    places = folder.places(model)
    _check_format(folder)
    parameters = dict(parameter_shapes(model))
    masters = [folder.states[name] for name in _MASTERS if name in folder.states]
    found: dict[str, tuple[MegatronTensors, Stored]] = {}
    for name, place in places.items():
        held = next((m for m in masters if place.names[0] in m.names), folder)
        found[name] = held, place
        if name in parameters:
            for moment in MOMENTS:
                found[state_name(moment, name)] = folder.states[moment], place
    _check_tensors(folder, parameters, found)
    return found


def _check_format(folder: MegatronFolder) -> None:
    formats = {
        str(kind)[:40]
        for each in _optimizers(read_common(folder.path).get("optimizer"))
        if (kind := each.get("param_state_sharding_type")) is not None
    }
    if folder.in_buckets or not folder.states:
        kind = f" ({', '.join(sorted(formats))})" if formats else ""
        why = "only the layout that saved them can read them"
        what = f"{folder.path} has masters and moments in buckets{kind}"
        attempt = "Megatron-LM's --dist-ckpt-optim-fully-reshardable, which saves them by weight"
        raise CheckpointError(Mistake(what, (why,), works=WEIGHTS_ALONE, attempt=attempt))
    other = sorted({*folder.states} - {*MOMENTS, *_MASTERS})
    if missing := [moment for moment in MOMENTS if moment not in folder.states]:
        what = f"{folder.path} has no {' and no '.join(missing)}: its optimizer was not Adam"
    elif other:
        what = f"{folder.path} has {', '.join(other)} of its optimizer, which AdamW lacks"
    else:
        return
    raise CheckpointError(Mistake(what, works=WEIGHTS_ALONE))


def _check_tensors(
    folder: MegatronFolder,
    parameters: Mapping[str, Any],
    sources: Mapping[str, tuple[MegatronTensors, Stored]],
) -> None:
    """Check that state exists, in the shapes of the weights and in types that are understood."""
    lacking, other, types = list[str](), list[str](), list[str]()
    for parameter in parameters:
        for kind in ("master", *MOMENTS):
            of_master = kind == "master"
            held, place = sources[parameter if of_master else state_name(kind, parameter)]
            for name in place.names:
                if name not in held.names:
                    lacking.append(f"{kind} of {name}")
                elif held.shape(name) != place.their_shape:
                    other.append(f"{kind} of {name}")
                elif held.dtype(name) not in (_WIDE if of_master else _TYPES):
                    types.append(f"{kind} of {name}: {held.dtype(name)}")
    for found, what in (
        (lacking, "lacks a part of its optimizer's state"),
        (other, "has optimizer's state of another shape than the weights"),
        (types, "has masters or moments in types that cannot be loaded"),
    ):
        if found:
            why = few(list(dict.fromkeys(found)), _SHOWN)
            raise CheckpointError(Mistake(f"{folder.path} {what}", (why,), WEIGHTS_ALONE))


def _optimizers(saved: Any) -> Iterator[dict[str, Any]]:
    """The entries of common.pt for each optimizer: one, or several chained by number."""
    of_all = _dict(saved)
    chained = bool(of_all) and all(key.isdecimal() for key in of_all)
    yield from (_dict(each) for each in (of_all.values() if chained else (of_all,)))


def _steps(optimizer: Mapping[str, Any]) -> Iterator[Any]:
    """Adam's step, wherever an optimizer keeps it."""
    inner = _dict(optimizer.get("optimizer")) or optimizer
    yield _dict(inner.get("state")).get("common_step")
    groups = inner.get("param_groups")
    yield from (_dict(group).get("step") for group in (groups if isinstance(groups, list) else ()))


def _loss_scale(
    folder: Path, optimizers: list[dict[str, Any]], hysteresis: int | None
) -> ScaleState | None:
    for optimizer in optimizers:
        scaler = _dict(optimizer.get("grad_scaler"))
        scale = number_in(folder, scaler.get("scale"))
        if scale is not None and scale > 0:
            good, left = (_count(scaler.get(f"{of}_tracker")) for of in ("growth", "hysteresis"))
            overflows = 0 if hysteresis is None or left is None else max(hysteresis - left, 0)
            return ScaleState(scale, good or 0, overflows)
    return None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
