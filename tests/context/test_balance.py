"""Every rank has as many tokens as any other and about as much work; nothing is lost or twice."""

import random

import pytest

from fivefold.context.balance import IMBALANCE, balanced, split, zigzag
from fivefold.model.attention.blocks import DocumentMask, joined, num_tokens


def packed(rng: random.Random, length: int, mean: int) -> DocumentMask:
    starts = [0]
    while starts[-1] < length:
        starts.append(min(length, starts[-1] + max(1, int(rng.expovariate(1 / mean)))))
    return DocumentMask(tuple(starts))


def excess(mask: DocumentMask, chunks: tuple[tuple[tuple[int, int], ...], ...]) -> float:
    areas = [sum(map(mask.area, own)) for own in chunks]
    return max(areas) * len(areas) / sum(areas)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_zigzag_balances_a_causal_row_exactly(parts: int) -> None:
    mask = DocumentMask((0, 24 * parts))
    assert excess(mask, zigzag(24 * parts, parts)) == 1.0
    assert split(1, mask, parts).chunks == zigzag(24 * parts, parts)


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_dealt_whole_and_evenly(seed: int) -> None:
    rng = random.Random(seed)
    parts, length = rng.choice([2, 4, 8]), 4096
    mask = packed(rng, length, rng.choice([1, 30, 200, 1000]))
    chunks = balanced(mask, parts)
    assert {num_tokens(own) for own in chunks} == {length // parts}
    tokens = sorted(p for own in chunks for start, stop in own for p in range(start, stop))
    assert tokens == list(range(length))
    assert all(list(own) == sorted(own) for own in chunks)
    assert balanced(mask, parts) == chunks
    assert excess(mask, chunks) <= excess(mask, zigzag(length, parts))


def test_packed_rows_balance_better_than_zigzag() -> None:
    """The mean over seeds: one long document among short ones is what zigzag does badly."""
    rng = random.Random(1)
    pairs = []
    for _ in range(30):
        long = rng.randint(1024, 3000)
        at = rng.randint(0, 4096 - long)
        short = packed(rng, 4096, 64).starts
        starts = sorted({s for s in short if not at < s < at + long} | {at, at + long})
        mask = DocumentMask(tuple(starts))
        pairs.append((excess(mask, balanced(mask, 4)), excess(mask, zigzag(4096, 4))))
    ours, theirs = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    assert ours < IMBALANCE + 0.02 and theirs > 1.3


def test_only_what_is_seen_is_sent() -> None:
    starts = (0, 8, 16, 24, 32)  # documents that end with the chunks
    shards = split(1, DocumentMask(starts), 2)
    assert not shards.sent(0, 1) and not shards.sent(1, 0)
    window = split(1, DocumentMask((0, 32), window=2), 2)  # zigzag: 0-8 and 24-32, 8-16 and 16-24
    assert window.sent(0, 1) == ((6, 8),)
    assert window.sent(1, 0) == ((22, 24),)


def test_groups_of_a_zigzag_are_a_zigzag_of_groups() -> None:
    merged = split(1, DocumentMask((0, 64)), 8).merged(2).chunks
    assert merged == tuple(joined(chunks) for chunks in zigzag(64, 4))


def test_a_row_must_have_two_chunks_for_each_rank() -> None:
    with pytest.raises(ValueError, match="30 tokens cannot be cut into 2 x 4"):
        split(1, DocumentMask((0, 30)), 4)
