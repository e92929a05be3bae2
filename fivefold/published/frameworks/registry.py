"""Finds the framework of a published run, or those that it can have been."""

import re

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
from fivefold.published.row import PublishedRow

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
_RELEASE = re.compile(r"\b(?:core_r|v)?(\d{1,4})[.-](\d{1,2})\b|\b(20[12]\d)\b")


def frameworks_of(row: PublishedRow) -> tuple[Framework, ...]:
    """What a row's run can have been: one framework if it is told or named, else several.

    The column `framework` counts, else the name of a framework in what the row says; the entry is
    that of the column `release`, or of a release that stands beside the name, or the latest.
    """
    told = row.text("framework")
    words = " ".join([row.source.lower(), row.text("model"), row.text("note")])
    for entries in FRAMEWORKS:
        named = told == entries[0].name if told else re.search(entries[0].mark, words)
        if named:
            return (_at(entries, row.text("release") or row.source.lower()),)
    return _possible(row)


def _at(entries: tuple[Framework, ...], text: str) -> Framework:
    """The entry of a release; the latest if none is told."""
    release = _release(text)
    if release is None:
        return entries[-1]
    return [entry for entry in entries if entry.since <= release or entry is entries[0]][-1]


def _release(text: str) -> tuple[int, ...] | None:
    found = _RELEASE.search(text)
    if found is None:
        return None
    if found[3]:
        return (int(found[3]),)
    first, second = int(found[1]), int(found[2])
    if text.startswith("core_r"):
        known = [date for minor, date in CORE_RELEASES.items() if minor <= second]
        return known[-1] if known else (2023,)
    return first, second


def _possible(row: PublishedRow) -> tuple[Framework, ...]:
    """The frameworks that runs with such settings have used."""
    early, sequence, _, flash, latest = MEGATRON
    alone = not any((row.whole(axis) or 1) > 1 for axis in ("tp", "pp", "ep"))
    if alone and re.match("3|fsdp|hsdp", row.text("zero")):
        return (FSDP[-1], DEEPSPEED[-1])
    if row.text("flops_conv") == "hfu96":
        return (early, sequence)
    if row.text("prec") == "fp16":
        sharded = row.text("zero") in ("1", "2")
        return (MEGATRON_DEEPSPEED[-1], flash) if sharded else (sequence, flash)
    before = row.text("gpu").startswith("a100") and not row.text("ep")
    return (flash, latest) if before else (latest,)
