"""`train --layout auto`: the planner's fastest layout for the available ranks."""

from fivefold.check import check
from fivefold.cli.budget import machine_within
from fivefold.cli.style import note
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.search.candidate import Candidate
from fivefold.search.request import ASSUMABLE, Request, request
from fivefold.search.search import search
from fivefold.tell.describe import summary
from fivefold.tell.explain import percent
from fivefold.tell.infeasible import why_nothing
from fivefold.units import human_bytes, human_seconds


def planned(
    config: Config, world: int, cluster: str, by_flag: frozenset[str], budget: str | None
) -> Config:
    """The configuration with the fastest layout that can be trained; prints which one, and how
    fast.

    Every rank of a launcher finds the same layout, since the search depends neither on time nor on
    chance.

    Args:
        config: configuration of the run; the layout settings of its recipe are left to the planner.
        world: number of ranks.
        cluster: kind of GPU, or TOML file of a cluster, whose times and memory count.
        by_flag: names of settings that were given by flags; those of the layout stay.
        budget: most bytes of tensors on a device as text; None: what the GPU has.

    Raises:
        ConfigError: the configuration or the budget is wrong, or no layout fits.
    """
    machine = machine_within(cluster, world, budget)
    asked = request(config, machine, by_flag=by_flag, by_recipe=ASSUMABLE)
    result = search(asked)
    if not result.found:
        raise why_nothing(result).spelled(ranks_for_gpus)
    refusal: ConfigError | None = None
    for candidate in result.found:
        chosen = with_layout(config, candidate)
        try:
            check(chosen, world)
        except ConfigError as error:
            refusal = refusal or error
            continue
        note("\n".join(_layout_lines(asked, candidate, result.found)))
        return chosen
    assert refusal is not None
    raise refusal


def ranks_for_gpus(choice: str) -> tuple[str, ...]:
    """Put a choice for `plan` in the words of `train` and `tune`."""
    return (choice.replace("--gpus ", "--nproc "),)


def with_layout(config: Config, candidate: Candidate) -> Config:
    """The configuration of a run with the layout of a plan."""
    layout = candidate.layout.config
    size = layout.training.micro_batch_size
    return config.with_values(**vars(layout.parallel), **vars(layout.memory), micro_batch_size=size)


def _layout_lines(asked: Request, chosen: Candidate, found: tuple[Candidate, ...]) -> list[str]:
    peak, capacity = chosen.memory.device_total, asked.cluster.gpu.memory_bytes
    lines = [
        f"layout: {summary(chosen.layout)}",
        f"  {human_seconds(chosen.seconds)} a step and {human_bytes(peak)} of "
        f"{human_bytes(capacity)}, by the times of {asked.cluster.name}",
    ]
    others = [c for c in found if c.mesh != chosen.mesh]
    if others:
        slower = percent(others[0].seconds / chosen.seconds - 1)
        lines.append(f"  the best of another mesh: {summary(others[0].layout)}, {slower}")
    if given := asked.fixed_words():
        lines.append(f"  given by flags: {', '.join(given)}")
    return lines
