"""What a launcher's hosts give their ranks: whether it is the same, and one run folder.

Each rank reads its own command line and its own host's files. A host with another flag, an older
checkout or other text would train its part of another run, and one that keeps the run folder on a
disk of its own would write its part of each checkpoint where nobody looks: all without a word.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import fivefold
from fivefold.config.config import SETTINGS, Config
from fivefold.data.prepare import PreparedData
from fivefold.errors import ConfigError, Mistake
from fivefold.layout import Layout
from fivefold.mesh.collectives import from_first, gather_objects
from fivefold.train.folder.lock import FILE
from fivefold.units import few, ranks_named

OF_A_HOST = frozenset(
    (
        "data_path",
        "valid_data_path",
        "tokenizer_model",
        "data_cache_path",
        "optimizer_offload_path",
        "param_offload_path",
        "non_persistent_local_ckpt_dir",
    )
)
"""Settings that name places of a host, which another one may have elsewhere: what is read there is
compared instead."""
SEEN_SECONDS = 75.0
"""In which a host sees a folder that another one has made: NFS remembers for up to a minute that
there was none."""
SHOWN = 8  # differences and hosts that a message lists


def gather_hosts() -> list[str]:
    """The host of every rank."""
    return gather_objects(socket.gethostname(), dist.group.WORLD)


def crossing(layout: Layout, hosts: Sequence[str]) -> str | None:
    """A note about tensor-parallel groups that span hosts; None if none does.

    Args:
        layout: layout of the ranks.
        hosts: host of every rank.
    """
    grid = layout.grid
    groups = sorted({grid.group_of(rank, ("tp",)) for rank in range(len(hosts))})
    across = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not across:
        return None
    first = across[0]
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in first))
    each = sorted({hosts.count(host) for host in set(hosts)})
    ranks = " or ".join(map(str, each))
    return (
        f"tensor parallelism of ranks {first[0]} to {first[-1]} crosses hosts {where}, and so do "
        f"{len(across)} of {len(groups)} such groups: every layer waits for the network. A host "
        f"has {ranks} ranks, of which tp {grid.tp} should be a divisor"
    )


def given_settings(config: Config) -> dict[str, str]:
    """The settings and the code version of this rank, by name."""
    settings = {
        name: setting.words(config.value(name))
        for name, setting in SETTINGS.items()
        if name not in OF_A_HOST
    }
    code = f"{fivefold.__version__}, sources {_sources()}"
    return {"fivefold": code, "torch": torch.__version__} | settings


def given_data(data: PreparedData) -> dict[str, str]:
    """The text that this rank has read, by its place."""
    sets = {f"validation set {name}": corpus.identity() for name, corpus in data.named.items()}
    return {name: f"{value}" for name, value in data.train.fingerprint.items()} | sets


def check_alike(own: Mapping[str, str], hosts: Sequence[str]) -> None:
    """Check that every rank was given the same as the first one; collective.

    Args:
        own: what this rank was given, by name.
        hosts: host of every rank.

    Raises:
        ConfigError: on every rank, what was given to which ranks.
    """
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    if len(set(gather_objects(digest, dist.group.WORLD))) == 1:
        return
    first = from_first(own, dist.group.WORLD)
    lines = [
        f"{name} = {own.get(name)}, not {first.get(name)}"
        for name in {**first, **own}
        if own.get(name) != first.get(name)
    ]
    shown = (*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)))
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, differences in enumerate(gather_objects(shown, dist.group.WORLD)):
        groups.setdefault(differences, []).append(rank)
    same = "start every rank by the same command, with the same files and the same code"
    raise ConfigError(
        *(
            Mistake(
                f"{_named(ranks, hosts)} not given what {_named([0], hosts)}",
                differences,
                attempt=same,
            )
            for differences, ranks in [*groups.items()][:SHOWN]
            if differences
        )
    )


def check_seen(folder: Path, hosts: Sequence[str]) -> None:
    """Check that every rank sees the first rank's lock in the run folder; collective.

    Raises:
        ConfigError: on every rank, which ranks do not.
    """
    lock = folder / FILE
    signed = from_first(_read(lock) if dist.get_rank() == 0 else "", dist.group.WORLD)
    deadline = time.monotonic() + SEEN_SECONDS
    while not (seen := _read(lock) == signed) and time.monotonic() < deadline:
        time.sleep(0.5)
    found = gather_objects((seen, os.getcwd()), dist.group.WORLD)
    if blind := [rank for rank, (sees, _) in enumerate(found) if not sees]:
        where, own = found[blind[0]][1], found[0][1]
        what = f"the run folder {folder} of rank 0 on {hosts[0]} is not there on {hosts[blind[0]]}"
        beside = () if folder.is_absolute() else (f"working folder {where}, that of rank 0 {own}",)
        who = ranks_named(blind)
        why = f"{who} would write parts of each checkpoint where no other rank sees them"
        works = ("--save /SHARED/runs/NAME, on a file system that all hosts mount there",)
        raise ConfigError(Mistake(what, (*beside, why), works))


def _read(file: Path) -> str | None:
    """The content of a file; None if there is no such file."""
    try:
        return file.read_text()
    except OSError:
        return None


def _sources() -> str:
    """A digest of this project's own code."""
    package = Path(fivefold.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks with their hosts, and the verb of a sentence about them: `ranks 2, 3 on b were`."""
    places = list(dict.fromkeys(hosts[rank] for rank in ranks))
    verb = "were" if len(ranks) > 1 else "was"
    return f"{ranks_named(ranks)} on {few(places, SHOWN)} {verb}"
