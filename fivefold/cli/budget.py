"""`--memory-budget`: how `train` and `plan` read it, and what `train` chooses to meet it."""

from fivefold.cli.style import note
from fivefold.config.config import Config
from fivefold.errors import ConfigError, Mistake
from fivefold.predict.cluster import Cluster
from fivefold.predict.cluster_file import load_cluster
from fivefold.units import read_bytes

AUTO = "auto"
BUDGET_HELP = "most bytes of tensors on a device, such as 70GiB"
EXAMPLES = ("--memory-budget 70GiB", "--memory-budget 512MiB")


def budget_bytes(text: str) -> float:
    """The bytes of a budget.

    Raises:
        ConfigError: the text is no size.
    """
    size = read_bytes(text)
    if size is None:
        what = f"--memory-budget must be a size above 0, not {text!r}"
        raise ConfigError(Mistake(what, works=EXAMPLES))
    return size


def machine_within(cluster: str, world: int, budget: str | None) -> Cluster:
    """The cluster with this many devices, whose tensors may take the budget.

    Args:
        cluster: kind of GPU, or TOML file of a cluster.
        world: number of devices.
        budget: size; None, or auto: what the device has, less what the planner
            reserves and leaves free.

    Raises:
        ConfigError: the budget or the cluster is wrong.
    """
    machine = load_cluster(cluster, world)
    return machine if budget in (None, AUTO) else machine.within(budget_bytes(budget))


def within_budget(
    config: Config, world: int, budget: str, cluster: str, by_flag: frozenset[str]
) -> Config:
    """The configuration with the fastest memory settings that fit; prints which, and what they
    cost.

    Args:
        config: configuration of the run.
        world: number of ranks.
        budget: size, or auto for what the device has, less what the planner
            reserves and leaves free.
        cluster: kind of GPU, or TOML file of a cluster, whose times and memory count.
        by_flag: names of settings that were given by flags; memory settings among them stay.

    Raises:
        ConfigError: the configuration or the budget is wrong, or nothing fits.
    """
    from fivefold.search.memory_budget import fit_memory
    from fivefold.search.request import Request
    from fivefold.tell.memory_budget import chosen, nothing_fits

    machine = machine_within(cluster, world, budget)
    request = Request(config, by_flag, machine, frozenset())
    fit = fit_memory(request)
    if fit.best is None:
        raise nothing_fits(request, fit)
    note("\n".join(chosen(request, fit)))
    return config.with_values(**vars(fit.best.layout.config.memory))
