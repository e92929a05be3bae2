"""Megatron-core's distributed checkpoints: where they lie, and which models they may be of."""

from pathlib import Path
from typing import Any

from fivefold.errors import CheckpointError, Mistake
from fivefold.files import read_json, read_text

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
NEVER = "apply_residual_connection_post_layernorm", "use_mup"
"""Switches that no model here has, most of which change what the same weights compute."""
HYBRID_SPEC = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"
"""The specification of models whose layers have one mixer each: its module, and its name there."""
HYBRID_EPSILON = 1e-5
"""What norms of Mamba-2's heads add to the variance there, whatever others do."""
_OLD = "mp_rank_00*"
"""Folders of the format that Megatron-LM had before distributed checkpoints."""


def is_megatron(folder: Path) -> bool:
    """Whether Megatron-LM keeps checkpoints in a folder, or it is one of them."""
    one = (folder / METADATA).is_file() and (folder / ".metadata").is_file()
    return one or (folder / TRACKER).is_file()


def megatron_checkpoint(folder: Path, step: int | None, step_flag: str = "--ckpt-step") -> Path:
    """The folder of one distributed checkpoint.

    Args:
        folder: that folder, or the one that Megatron-LM's --save named.
        step: iteration of the checkpoint; None: the latest.
        step_flag: flag of the command with which users choose it.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    found = folder
    if (folder / METADATA).is_file():
        if step is not None and folder.name != f"iter_{step:07d}":
            what = f"{folder} is one checkpoint, and not known to be that of iteration {step}"
            raise CheckpointError(Mistake(what, works=(f"{step_flag} none",)))
    else:
        tracked = read_text(folder / TRACKER, CheckpointError) if step is None else str(step)
        iteration = tracked.strip()[:19]
        found = folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release")
        if not found.is_dir():
            there = sorted(path.name[5:] for path in folder.glob("iter_*"))
            works = tuple(f"{step_flag} {int(step)}" for step in there if step.isdecimal())
            what = f"there is no checkpoint of iteration {iteration} in {folder}"
            raise CheckpointError(Mistake(what, works=works))
    if any(found.glob(_OLD)):
        what = f"{found} has the format of --ckpt-format torch, a file of each rank"
        attempt = "Megatron-LM's --ckpt-convert-format torch_dist, with --ckpt-convert-save FOLDER"
        raise CheckpointError(Mistake(what, attempt=attempt))
    kind = read_json(found / METADATA, dict[str, Any], CheckpointError).get("sharded_backend")
    if kind != "torch_dist":
        what = f"{found} is a checkpoint of format {str(kind)[:40]!r}"
        works = ("torch_dist (Megatron-LM's --ckpt-format)",)
        raise CheckpointError(Mistake(what, works=works))
    return found
