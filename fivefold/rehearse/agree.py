"""Compares the scripts of ranks: would the job hang? Imports no torch."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, zip_longest

from fivefold.rehearse.script import Issued, Script
from fivefold.units import human_bytes

MESSAGES = ("send", "receive")


def disagreements(scripts: Sequence[Script], name: Callable[[int], str]) -> list[str]:
    """Why these ranks would wait for each other for ever, or receive what was not meant for them.

    For each pair of ranks only the first difference is reported, since later ones may follow from
    it. If no pair differs, one circular wait is reported, if there is any.

    Args:
        scripts: what some ranks of a job do; other ranks are assumed to be like them.
        name: coordinates of a rank, as text.
    """
    found = [
        what
        for one, other in combinations(map(_Sorted, scripts), 2)
        for what in [next(_between(one, other, name), None)]
        if what is not None
    ]
    return found or list(_circular_wait(scripts, name))


class _Sorted:
    """A script whose operations are found by their group: each pair of ranks asks for them.

    Attributes:
        rank: as of the script, and so are `groups` and `axes`.
        collectives: collectives of each group, in order.
        messages: messages of each kind, group and peer, in order.
    """

    def __init__(self, script: Script) -> None:
        self.rank, self.groups, self.axes = script.rank, script.groups, script.axes
        self.collectives: defaultdict[str, list[Issued]] = defaultdict(list)
        self.messages: defaultdict[tuple[str, str, int | None], list[Issued]] = defaultdict(list)
        for call in script.issued:
            if call.op in MESSAGES:
                self.messages[call.op, call.group, call.peer].append(call)
            else:
                self.collectives[call.group].append(call)


def _between(one: _Sorted, other: _Sorted, name: Callable[[int], str]) -> Iterator[str]:
    """Differences between two ranks, the first one first."""
    here, there = f"rank {one.rank} {name(one.rank)}", f"rank {other.rank} {name(other.rank)}"
    shared = []
    for mine, theirs, who, whom in ((one, other, here, there), (other, one, there, here)):
        for group, ranks in mine.groups.items():
            if other.rank in ranks and one.rank in ranks:
                if theirs.groups.get(group) != ranks:
                    axis = mine.axes.get(group, group)
                    yield f"{who} makes a group of {len(ranks)} ranks ({axis}), {whom} does not"
                elif mine is one:
                    shared.append(group)
    for group in shared:
        yield from _collectives(one, other, group, (here, there))
        yield from _messages(one, other, group, (here, there))
        yield from _messages(other, one, group, (there, here))


def _collectives(one: _Sorted, other: _Sorted, group: str, who: tuple[str, str]) -> Iterator[str]:
    ranks, axis = one.groups[group], one.axes.get(group, group)
    at, opposite = ranks.index(one.rank), ranks.index(other.rank)
    both = (script.collectives[group] for script in (one, other))
    for number, (mine, theirs) in enumerate(zip_longest(*both), 1):
        what = f"collective {number} of the {axis} group"
        if mine is None or theirs is None:
            waits, lacks = who if theirs is None else who[::-1]
            yield f"{waits} waits in {_named(mine or theirs)}, {what}, which {lacks} never enters"
            return
        same = (mine.op, mine.dtype) == (theirs.op, theirs.dtype)
        if same and mine.parts and theirs.parts:
            there, back = mine.parts[0][opposite], theirs.parts[1][at]
            if there != back:
                sizes = f"{human_bytes(there)}, and {who[1]} expects {human_bytes(back)}"
                yield f"{what}: {who[0]} sends {sizes} of it"
                return
        elif not same or mine.size != theirs.size:
            yield f"{what} is {_named(mine)} on {who[0]}, and {_named(theirs)} on {who[1]}"
            return


def _circular_wait(scripts: Sequence[Script], name: Callable[[int], str]) -> Iterator[str]:
    """A circular wait: ranks enter collectives of several groups in different orders, so that each
    waits in one for a rank that waits in the next. NCCL may hang then, too, although its groups
    have streams of their own."""
    users = Counter(g for script in scripts for g in {call.group for call in script.issued})
    order: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    first: dict[tuple[tuple[str, int], tuple[str, int]], Script] = {}
    for script in scripts:
        count: Counter[str] = Counter()
        before: tuple[str, int] | None = None
        for group in (call.group for call in script.issued if call.op not in MESSAGES):
            if users[group] == 1:  # nobody here waits in it for another one
                continue
            count[group] += 1
            here = group, count[group]
            if before is not None:
                order.add(here, before)
                first.setdefault((before, here), script)
            before = here
    try:
        order.prepare()
    except CycleError as error:
        lines = []
        for step in pairwise(error.args[1]):
            script = first[step]
            one, other = (f"collective {n} of its {script.axes.get(g, g)} group" for g, n in step)
            lines.append(f"rank {script.rank} {name(script.rank)} enters {one} before {other}")
        yield f"a circular wait: {'; '.join(lines)}"


def _messages(source: _Sorted, target: _Sorted, group: str, who: tuple[str, str]) -> Iterator[str]:
    """Sends without a receive, receives without a send, messages of unequal size, and messages
    received in another order than sent, which NCCL pairs wrongly."""
    ranks, axis = source.groups[group], source.axes.get(group, group)
    sent = source.messages["send", group, ranks.index(target.rank)]
    got = target.messages["receive", group, ranks.index(source.rank)]
    leaving, coming = _by_tag(sent), _by_tag(got)
    for tag in dict.fromkeys((*leaving, *coming)):
        for leaves, comes in zip_longest(leaving.get(tag, ()), coming.get(tag, ())):
            what = f"message {tag} of the {axis} group"
            if comes is None:
                yield f"{who[0]} sends {what} to {who[1]}, which never receives it"
            elif leaves is None:
                yield f"{who[1]} waits for {what} from {who[0]}, which never sends it"
            elif (leaves.size, leaves.dtype) != (comes.size, comes.dtype):
                yield (
                    f"{what}: {who[0]} sends {_sized(leaves)}, and {who[1]} expects {_sized(comes)}"
                )
    for leaves, comes in zip(sent, got, strict=False):
        if leaves.tag != comes.tag:
            yield (
                f"{who[0]} sends message {leaves.tag} of the {axis} group to {who[1]}, which "
                f"receives message {comes.tag} in its place"
            )


def _by_tag(calls: Sequence[Issued]) -> dict[int, list[Issued]]:
    found: defaultdict[int, list[Issued]] = defaultdict(list)
    for call in calls:
        found[call.tag].append(call)
    return found


def _named(call: Issued) -> str:
    return f"{call.op} of {_sized(call)}"


def _sized(call: Issued) -> str:
    return f"{human_bytes(call.size)} of {call.dtype}"
