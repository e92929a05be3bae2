"""Which device ranks train on: the one that was asked for, or the reason why not."""

import pytest

from fivefold.errors import ConfigError
from fivefold.train.machine.devices import Asked, choose_device, lacks_units
from fivefold.train.ranks.rank_env import Launcher, RankEnv


def env(launcher: Launcher, ranks: int) -> RankEnv:
    """The last of so many ranks, all on this machine."""
    return RankEnv(ranks - 1, ranks - 1, ranks, ranks, "host", 29500, launcher=launcher)


@pytest.mark.parametrize(
    ("asked", "launcher", "ranks", "gpus", "kind", "why"),
    [
        ("auto", "single", 4, 0, "cpu", "no GPU is visible"),
        ("auto", "single", 4, 1, "cpu", "4 ranks here need a GPU each, and 1 GPU is visible"),
        (
            "cuda",
            "single",
            4,
            2,
            "cuda",
            "4 ranks share 2 GPUs, and send through the host: for proofs, not for speed",
        ),
        ("auto", "single", 4, 8, "cuda", "8 GPUs are visible, 4 needed"),
        ("auto", "single", 1, 1, "cuda", "1 GPU is visible, 1 needed"),
        ("cpu", "torchrun", 8, 8, "cpu", "--device cpu"),
        ("auto", "torchrun", 8, 8, "cuda", "8 GPUs are visible, 8 needed"),
        ("auto", "torchrun", 8, 0, "cpu", "no GPU is visible"),
        ("auto", "slurm", 8, 1, "cuda", "one GPU visible to each of 8 ranks"),
        ("cuda", "slurm", 8, 8, "cuda", "8 GPUs are visible, 8 needed"),
    ],
)
def test_choices(
    asked: Asked, launcher: Launcher, ranks: int, gpus: int, kind: str, why: str
) -> None:
    nproc = ranks if launcher == "single" else None
    here = RankEnv() if launcher == "single" else env(launcher, ranks)
    choice = choose_device(asked, here, nproc, gpus)
    assert (choice.kind, choice.why) == (kind, why)
    assert choice.shared == (kind == "cuda" and "share" in why)


@pytest.mark.parametrize(
    ("asked", "launcher", "ranks", "gpus", "works"),
    [
        ("cuda", "single", 1, 0, ("--device cpu",)),
        ("cuda", "single", 4, 0, ("--device cpu",)),
        ("cuda", "torchrun", 4, 2, ("--device cpu",)),  # only ranks of --nproc share
        # A launcher's ranks never fall back: whoever has GPUs did not mean the CPU.
        ("auto", "torchrun", 8, 4, ("--device cpu",)),
        ("auto", "torchrun", 2, 1, ("--device cpu",)),  # they all see the same one
        ("auto", "slurm", 8, 4, ("--device cpu",)),
    ],
)
def test_too_few(
    asked: Asked, launcher: Launcher, ranks: int, gpus: int, works: tuple[str, ...]
) -> None:
    nproc = ranks if launcher == "single" else None
    here = RankEnv() if launcher == "single" else env(launcher, ranks)
    with pytest.raises(ConfigError, match="GPU") as refused:
        choose_device(asked, here, nproc, gpus)
    (mistake,) = refused.value.mistakes
    assert mistake.works == works


@pytest.mark.parametrize(
    ("precision", "capability", "says"),
    [
        ("bf16", (7, 5), "GPUs of sm 7.5 have no units that multiply bf16"),
        ("fp16", (7, 5), ""),
        ("fp32", (7, 0), ""),
        ("bf16", (8, 0), ""),
        ("bf16", (12, 0), ""),
    ],
)
def test_who_has_no_units_for_bf16_is_told(
    precision: str, capability: tuple[int, int], says: str
) -> None:
    assert lacks_units(precision, capability).startswith(says)
    assert bool(lacks_units(precision, capability)) == bool(says)
