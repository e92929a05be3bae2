"""The rank of this process, from the environment of torchrun or Slurm. Imports no torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fivefold.errors import ConfigError, Mistake, Mistakes, PlaceError, shown
from fivefold.train.health.activity import Activity

Launcher = Literal["single", "local", "torchrun", "slurm"]

MOST_PORT = 65_535
SLURM_FIRST_PORT = 10_000
SLURM_PORTS = 20_000  # 10000-29999: above the well-known ports, below Linux' ephemeral ones
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_NODES = re.compile(rf"\s*((?:[\w.-]|{_RANGES})+)\s*(?:,|$)")  # the first of a list


@dataclass(frozen=True)
class RankEnv:
    """The rank of this process, and the address of the rendezvous store.

    Attributes:
        rank: number of this process among all machines, 0 to world_size - 1.
        local_rank: number of this process on this machine, which is also that of its GPU.
        master_addr: host of the rendezvous store.
        master_port: port of the rendezvous store.
        launcher: program that started the processes; "local" is `launch_local`, whose parent
            process hosts the store.
        generation: how often living ranks have met again, with new ones for those that died.
        activity: what this process is doing; not part of its address.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Launcher = "single"
    generation: int = 0
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if size < 1:
                mistakes.add(f"{name}s are numbered among {size}", "there must be at least 1")
            elif not 0 <= value < size:
                mistakes.add(
                    f"{name} {value} does not exist among {size}", f"it must be 0 .. {size - 1}"
                )
        if self.local_world_size > self.world_size:
            mistakes.add(
                f"{self.local_world_size} ranks on this machine, but only {self.world_size} in all"
            )
        if self.launcher in ("torchrun", "slurm"):
            if not 0 < self.master_port <= MOST_PORT:
                mistakes.add(f"MASTER_PORT must be 1 .. {MOST_PORT}, not {self.master_port}")
            if not self.master_addr.strip():
                mistakes.add("MASTER_ADDR is empty", "it names the host of the first rank")
        mistakes.raise_if_any()

    @property
    def restarted(self) -> bool:
        """Whether torchrun has started this process again, after a failure."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun would have set for this rank."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def read_rank_env(variables: Mapping[str, str] = os.environ) -> RankEnv:
    """The rank given by torchrun, else by srun; else a single process.

    Raises:
        PlaceError: some variables of a launcher are missing or impossible, or an sbatch script did
            not call srun.
    """
    try:
        return _read(variables)
    except ConfigError as error:
        raise PlaceError(*error.mistakes) from None


def _read(variables: Mapping[str, str]) -> RankEnv:
    if "RANK" in variables or "LOCAL_RANK" in variables:
        return _from_torchrun(variables)
    if "SLURM_PROCID" in variables:
        return _from_slurm(variables)
    if variables.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            Mistake(
                f"WORLD_SIZE is {variables['WORLD_SIZE']} but RANK is not set",
                why=("torchrun sets both",),
                attempt="unset WORLD_SIZE",
            )
        )
    return _single(variables)


def _single(variables: Mapping[str, str]) -> RankEnv:
    """A single process, unless mpirun has started several, which would all do the same."""
    for name in MPI_SIZES:
        if (size := variables.get(name, "1")) != "1":
            what = f"mpirun has started {size} processes ({name}), which do not know of each other"
            why = f"ranks are told by {', '.join(TORCHRUN_VARIABLES)}, as torchrun sets them"
            works = ("torchrun or srun in place of mpirun", "--nproc N, without a launcher")
            raise ConfigError(Mistake(what, (why,), works))
    return RankEnv()


def _from_torchrun(variables: Mapping[str, str]) -> RankEnv:
    missing = [name for name in TORCHRUN_VARIABLES if name not in variables]
    if missing:
        there = [name for name in TORCHRUN_VARIABLES if name in variables]
        raise ConfigError(
            Mistake(
                f"{' and '.join(there)} set, but not {' and '.join(missing)}",
                why=("torchrun sets them all",),
                attempt=f"unset {' '.join(there)}",
            )
        )
    world_size = _integer(variables, "WORLD_SIZE")
    return RankEnv(
        rank=_integer(variables, "RANK"),
        local_rank=_integer(variables, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", world_size),
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        launcher="torchrun",
    )


def _from_slurm(variables: Mapping[str, str]) -> RankEnv:
    world_size = _integer(variables, "SLURM_STEP_NUM_TASKS", _integer(variables, "SLURM_NTASKS", 1))
    if world_size == 1:
        return _single(variables)
    # sbatch runs its script as a step of its own, with SLURM_PROCID=0 and no step id.
    if variables.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in variables:
        raise ConfigError(
            Mistake(
                f"sbatch asked for {world_size} tasks, but only its script runs",
                attempt="put srun before the command",
            )
        )
    return RankEnv(
        rank=_integer(variables, "SLURM_PROCID"),
        local_rank=_integer(variables, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_slurm_local_world_size(variables, world_size),
        master_addr=variables.get("MASTER_ADDR") or _slurm_address(variables),
        master_port=_integer(variables, "MASTER_PORT", _slurm_port(variables)),
        launcher="slurm",
    )


def _slurm_address(variables: Mapping[str, str]) -> str:
    """The first host of the job step, on which its first rank runs."""
    found = [n for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if variables.get(n)]
    if not found:
        raise ConfigError("SLURM_PROCID is set, but neither SLURM_NODELIST nor MASTER_ADDR")
    if not (host := first_host(variables[found[0]])):
        what = f"{found[0]} is no list of nodes: {shown(variables[found[0]])}"
        why = "it tells the host of the first rank, unless MASTER_ADDR does"
        raise ConfigError(Mistake(what, (why,), works=("n[01-04],m1", "MASTER_ADDR=HOST")))
    return host


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list; empty if there is none.

    >>> first_host("gpu[007-012,020],login1")
    'gpu007'
    >>> first_host("rack[2,5]-node[1-4]")
    'rack2-node1'
    """
    first = _NODES.match(nodelist)
    return "" if first is None else re.sub(r"\[(\d+)[^]]*\]", r"\1", first[1])


def _slurm_port(variables: Mapping[str, str]) -> int:
    """A port that is the same on every rank and differs between jobs and their steps."""
    job = _integer(variables, "SLURM_JOB_ID", 0)
    step = _integer(variables, "SLURM_STEP_ID", 0)
    return SLURM_FIRST_PORT + (31 * job + step) % SLURM_PORTS


def _slurm_local_world_size(variables: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node, from a list such as "8(x3),4", else from the number requested."""
    layout = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    node = _integer(variables, "SLURM_NODEID", 0)
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
        if node < int(repeat or 1):
            return int(tasks)
        node -= int(repeat or 1)
    return min(world_size, _integer(variables, "SLURM_NTASKS_PER_NODE", world_size))


def _integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        found = "not set" if text is None else repr(text)
        raise ConfigError(f"{name} must be a whole number, and is {found}") from None


def check_restarts(most: int, launcher: str, save: str | None) -> None:
    """Check that something can start the ranks again, and that they will find their run.

    Args:
        most: restarts that the command asks for.
        launcher: program that started this process.
        save: the run folder of --save.

    Raises:
        ConfigError: ranks of torchrun or srun ask for restarts, or ranks that torchrun would start
            again would begin a run of their own.
    """
    if launcher in ("torchrun", "slurm") and most:
        again = {
            "torchrun": f"torchrun --max-restarts {most} starts them again",
            "slurm": "the job, submitted again, goes on from its last checkpoint",
        }[launcher]
        what = f"--max-restarts {most} is for the ranks of --nproc; {launcher} started these"
        raise ConfigError(Mistake(what, (again,), works=("--max-restarts 0",)))
    torchrun_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if launcher == "torchrun" and torchrun_restarts != "0" and save is None:
        what = f"torchrun --max-restarts {torchrun_restarts} needs --save: ranks that it starts"
        what += " again would begin another run"
        raise ConfigError(Mistake(what, attempt="--save runs/NAME"))
