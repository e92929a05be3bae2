"""Finds the framework of a published run, or those that may have run it."""

import re

from fivefold.errors import DataError, did_you_mean
from fivefold.published.frameworks.deepspeed import DEEPSPEED, MEGATRON_DEEPSPEED, XTUNER
from fivefold.published.frameworks.framework import Framework
from fivefold.published.frameworks.megatron import CORE_RELEASES, MEGATRON
from fivefold.published.frameworks.nemo import BRIDGE, NEMO
from fivefold.published.frameworks.others import (
    HAI_LLM,
    INTERNLM,
    META,
    NANOTRON,
    TORCHTITAN,
)
from fivefold.published.frameworks.pytorch import AUTOMODEL, FOUNDRY, FSDP, KEMPNER, MAXTEXT
from fivefold.published.row import PublishedRow, cluster_of

FRAMEWORKS: tuple[tuple[Framework, ...], ...] = (
    NANOTRON,
    TORCHTITAN,
    FOUNDRY,
    XTUNER,
    INTERNLM,
    AUTOMODEL,
    BRIDGE,
    NEMO,
    MAXTEXT,
    KEMPNER,
    FSDP,
    HAI_LLM,
    META,
    MEGATRON_DEEPSPEED,
    DEEPSPEED,
    MEGATRON,
)
"""Each framework's entries by release, the oldest first; the first whose mark is found counts."""
_DATE = re.compile(r"(?<![\w.])(?:v|20)?([1-4]\d)[.-](1[0-2]|0?[1-9])\b|\b(20[1-4]\d)\b")
"""A year and a month, with or without its century, or a year."""
_CORE = re.compile(r"(?:\b|core_[rv])v?0\.(\d{1,2})\b")
"""A release of Megatron-core: core_r0.12, core_v0.12.1, v0.12.0."""


def frameworks_of(row: PublishedRow) -> tuple[Framework, ...]:
    """The possible frameworks of a row's run: one if it is named, else several.

    The column `framework` counts, else the name of a framework in what the row says; the entry is
    that of the column `release`, or of a release that stands beside the name, or the latest.

    Raises:
        DataError: a column names a framework that is not known, or a release that has no date.
    """
    named = row.text("framework")
    words = named or " ".join([row.source.lower(), row.text("model"), row.text("note")])
    for entries in FRAMEWORKS:
        if named == entries[0].name or re.search(entries[0].mark, words):
            return (_at(entries, row),)
    if named:
        names = [entries[0].name for entries in FRAMEWORKS]
        close = did_you_mean(named, names)
        raise DataError(f"framework {named!r} is none of {', '.join(names)}, or empty{close}")
    return _possible(row)


def _at(entries: tuple[Framework, ...], row: PublishedRow) -> Framework:
    """The entry of a row's release; the latest if none is named."""
    column = row.text("release")
    release = _released(entries, column or row.source.lower())
    if release is None and column and len(entries) > 1:
        what = f"release {column!r} of {entries[0].name} has no date"
        raise DataError(f"{what}: give its year and month, such as 2025-06")
    if release is None:
        return entries[-1]
    return [entry for entry in entries if entry.since <= release or entry is entries[0]][-1]


def _released(entries: tuple[Framework, ...], text: str) -> tuple[int, ...] | None:
    """The year, or year and month, of a release; None if the text says neither."""
    if entries is MEGATRON and (core := _CORE.search(text)):
        known = [date for minor, date in CORE_RELEASES.items() if minor <= int(core[1])]
        return known[-1] if known else (2023,)
    found = _DATE.search(text)
    if found is None:
        return None
    return (int(found[3]),) if found[3] else (2000 + int(found[1]), int(found[2]))


def _possible(row: PublishedRow) -> tuple[Framework, ...]:
    """The frameworks that runs with such settings have used."""
    early, sequence, _, flash, latest = MEGATRON
    alone = not any((row.whole(axis) or 1) > 1 for axis in ("tp", "pp", "ep"))
    if alone and re.match("3|fsdp|hsdp", row.text("zero")):
        return (FSDP[-1], DEEPSPEED[-1])
    if row.text("flops_conv") == "hfu96":
        return (early, sequence)
    if row.text("prec") == "fp16":
        sharded = row.text("zero").partition(" ")[0] in ("1", "2")
        return (MEGATRON_DEEPSPEED[-1], flash) if sharded else (sequence, flash)
    before = cluster_of(row).gpu.name.startswith("A100") and not row.text("ep")
    return (flash, latest) if before else (latest,)
