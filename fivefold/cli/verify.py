"""`fivefold verify`: prove that a layout computes what one device computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.check import check
from fivefold.cli.helps import DEVICE_HELP, JSON_HELP, NPROC_HELP, RECIPE_HELP
from fivefold.cli.style import note
from fivefold.cli.verdict import tell
from fivefold.config.rules.graph import check_graph_device
from fivefold.config.settings import Count, argument, option
from fivefold.config.sources import load
from fivefold.config.training import ELEMENT_BYTES
from fivefold.expert.deepep_rules import check_deepep
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.ranks.rank_env import RankEnv

PRECISIONS = ("--precision", *(f"--{name}" for name in ELEMENT_BYTES))


@dataclass(frozen=True)
class Options:
    """Run a layout and one device on the same weights and data, and compare what they compute.

    Every loss, gradient, norm and updated weight is compared, in fp64 or the given --precision, on
    synthetic batches made to reveal wrong reductions. A model that is too large is made smaller,
    with fewer and narrower layers, but the same structure and layout. The exit status is 0 only if
    everything agrees.
    """

    recipe: str | None = argument(RECIPE_HELP, None)
    nproc: Count = option(1, NPROC_HELP)
    device: Asked = option("auto", f"where to run; {DEVICE_HELP}")
    steps: int | None = option(
        None, "optimizer steps to compare (default: 3; with CUDA graphs 4, since the third records)"
    )
    delays: int | None = option(
        None, "delay streams of GPUs at random, with this seed, to reveal missing waits"
    )
    races: bool = option(
        False,
        "track accesses of GPU streams; fail if no wait orders two accesses to the same memory",
    )
    json: bool = option(False, JSON_HELP)
    plant: (
        Literal[
            "skip-tp-sum",
            "skip-dp-sum",
            "skip-tied-sum",
            "own-token-count",
            "double-dx",
            "bias-on-each-rank",
            "cp-skip-block",
            "cp-lose-gradients",
            "cp-rank-order",
            "cp-local-positions",
            "double-experts",
            "skip-edp-sum",
            "detach-router",
            "double-expert-counts",
        ]
        | None
    ) = option(None, "plant this error, to see how it is detected and named")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options, config = load(in_fp64(argv), Options, note)
    layout = check(config, options.nproc)
    from fivefold.verify.run import verify

    gpus = visible_gpus()
    device = choose_device(options.device, RankEnv(), options.nproc, gpus)
    check_deepep(config, device.kind, shared=device.shared)
    check_graph_device(config, device.kind, shared=device.shared)
    if device.shared:
        note(device.why)
    report = verify(
        layout,
        steps=options.steps,
        plant=options.plant,
        device=device,
        delays=options.delays,
        races=options.races,
    )
    return tell(report, as_json=options.json)


def in_fp64(argv: Sequence[str]) -> list[str]:
    """The command line, with fp64 for the precision unless it has a flag for that."""
    given = any(word.partition("=")[0] in PRECISIONS for word in argv)
    return list(argv) if given else ["--precision", "fp64", *argv]
