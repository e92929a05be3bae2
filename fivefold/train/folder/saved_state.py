"""The state of a run in a checkpoint besides its tensors: step, position in the data, model."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.by_layer import IN_BF16, OF_ITS_LOSS
from fivefold.config.config import SETTINGS
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.data.loader import LoaderState
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import as_kind
from fivefold.optim.loss_scale import ScaleState

# What may differ between a checkpoint's model and ours without making it another model.
_FREE_MODEL_FIELDS = (
    *("hidden_dropout", "embedding_dropout", "attention_dropout", "lora_dropout"),
    *(*INITIAL, *IN_BF16, *OF_ITS_LOSS),
)

_MOST = 2**53  # steps or samples: beyond it indices of tokens overflow
T = TypeVar("T")

_Count = Annotated[int, Meta(ge=0, le=_MOST)]


@dataclass(frozen=True)
class SavedState:
    """The `meta.json` of a run's checkpoint.

    Attributes:
        step: number of steps done.
        loader: place in the data, and a description of the data.
        model: fields of the model's `ModelConfig`.
        seq_length: tokens per sample.
        losses: the latest losses, oldest first, where spikes are looked for.
        loss_scale: the dynamic loss scale, in fp16.
        skipped: steps done that only consumed their data, as `iterations_to_skip` has them.
    """

    step: _Count
    loader: LoaderState
    model: dict[str, Any]
    seq_length: _Count
    losses: tuple[float, ...] = ()
    loss_scale: ScaleState | None = None
    skipped: tuple[_Count, ...] = ()


def read_state(source: Checkpointer, step: int | None) -> SavedState:
    """The state of a checkpoint, the latest if `step` is None; collective, like `source`.

    Raises:
        CheckpointError: no such checkpoint, or its state is damaged or contradicts itself.
    """
    found = source.find(step)
    what = f"meta.json of step {found} in {source.folder}"
    state = as_kind(source.read_meta(found), SavedState, what, CheckpointError)
    as_kind(state.model, ModelConfig, f"the model in {what}", CheckpointError)
    samples, seq_length = state.loader["consumed_samples"], state.seq_length
    of_data = state.loader["fingerprint"].get("seq_length", seq_length)
    wrong = []
    if state.step != found:
        wrong.append(f"it is of step {state.step}")
    if not state.step <= samples <= (_MOST if state.step else 0):
        wrong.append(f"{samples} samples cannot be those of {state.step} steps")
    if len({*state.skipped} & {*range(state.step)}) < len(state.skipped):
        wrong.append(f"it skipped other steps than the {state.step} that it is of")
    if of_data != seq_length:
        wrong.append(f"samples have {seq_length} tokens, those of the data {of_data}")
    if wrong:
        raise CheckpointError(Mistake(f"{what} contradicts itself", tuple(wrong)))
    return state


def reading(source: Checkpointer, step: int | None, work: Callable[[int], T]) -> T:
    """Run `work` on the checkpoint of a step and return its result; collective, like `source`.

    If the latest is meant, and a running job removes it meanwhile, `work` gets the newest one
    instead.

    Args:
        source: checkpoints of a run.
        step: the step; None: the latest.
        work: step -> what is read of its checkpoint; has changed nothing that matters if it fails.

    Raises:
        CheckpointError: there is no such checkpoint, or `work` failed.
    """
    while True:
        found = source.find(step)
        try:
            return work(found)
        except CheckpointError:
            if found in source.agree(source.steps):
                raise


def same_model(
    saved: dict[str, Any], model: ModelConfig, where: Path | str, *, by_flags: bool = False
) -> None:
    """Check that what is saved somewhere is of our model, except for fields that may change.

    Raises:
        CheckpointError: it is of another model; the error names every field that differs, and,
            where a model can be changed `by_flags`, those that make ours theirs.
    """
    # A setting newer than the checkpoint had its default then.
    found = as_kind(saved, ModelConfig, f"the model of {where}", CheckpointError)
    was, now = _fields(found), _fields(model)
    changed = _differing(was, now)
    if changed:
        said = {name: SETTINGS[name].words for name in changed}
        differences = tuple(
            f"{n}: was {words(was[n])}, is {words(now[n])}" for n, words in said.items()
        )
        theirs = {name: was[name] for name in changed}
        # Of sizes derived from others, only those that would then differ.
        again = _fields(replace(model, **theirs))
        theirs |= {name: was[name] for name in _differing(was, again)}
        flags = " ".join(SETTINGS[name].typed(value) for name, value in theirs.items())
        works = (flags,) if by_flags else ()
        raise CheckpointError(Mistake(f"{where} is of another model", differences, works=works))


def _differing(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [n for n in now if was[n] != now[n] and n not in _FREE_MODEL_FIELDS]


def without_adapters(state: SavedState, model: ModelConfig) -> bool:
    """Whether a checkpoint lacks the adapters that our model has."""
    return model.lora_rank is not None and state.model.get("lora_rank") is None


def _fields(model: ModelConfig) -> dict[str, Any]:
    """All fields, with derived values filled in."""
    return asdict(model.spelt_out() if model.num_attention_heads else model)
