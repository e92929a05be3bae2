import math

import pytest
import torch

from fivefold.model.dropout import Dropout, drop_mask
from fivefold.model.random_bits import hash64

MASK64 = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The finaliser as published, on Python's unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def test_hash_equals_the_published_one() -> None:
    numbers = [0, 1, 2, 12345, 2**40 + 7, 2**63 - 1, -1, -(2**63)]
    hashed = hash64(torch.tensor(numbers)).tolist()
    assert [h & MASK64 for h in hashed] == [splitmix64(n & MASK64) for n in numbers]


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_rate_of_rows_columns_and_all(p: float) -> None:
    rows, columns = torch.arange(1000, 2000)[:, None], torch.arange(1000)
    mask = drop_mask(rows, columns, p, key=99).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(mask.mean() - p) < 5 * deviation / 1000
    for dim in (0, 1):
        z = (mask.mean(dim) - p) / (deviation / math.sqrt(1000))
        assert z.abs().max() < 5.5
        assert 0.9 < z.std() < 1.1


def test_neighbours_keys_and_shifts_are_uncorrelated() -> None:
    rows, columns = torch.arange(1001)[:, None], torch.arange(1001)
    mask = drop_mask(rows, columns, 0.5, key=1).double() - 0.5
    other = drop_mask(rows, columns, 0.5, key=2).double() - 0.5
    limit = 5 * 0.25 / 1000
    assert abs((mask * other).mean()) < limit
    assert abs((mask[1:] * mask[:-1]).mean()) < limit
    assert abs((mask[:, 1:] * mask[:, :-1]).mean()) < limit
    assert abs((mask[1:, 1:] * mask[:-1, :-1]).mean()) < limit
    assert abs((mask * mask.t()).fill_diagonal_(0).mean()) < limit


def dropout(token_ids_BS: torch.Tensor, **changes: int) -> Dropout:
    settings = {"seed": 1, "step": 2} | changes
    ids_T = token_ids_BS.flatten()
    return Dropout(rows_T=ids_T, all_rows_T=ids_T, token_ids_BL=token_ids_BS, **settings)


def test_hidden_mask_does_not_depend_on_how_tokens_are_sharded() -> None:
    ids = torch.arange(40, 64).view(2, 12)
    x = torch.randn(24, 8, dtype=torch.float64)
    whole = dropout(ids).at("layers.0.mlp")(x, 0.3)
    parts = [
        dropout(ids.flatten()[part][None]).at("layers.0.mlp")(x[part], 0.3)
        for part in (slice(0, 5), slice(5, 24))
    ]
    assert torch.equal(torch.cat(parts), whole)
    kept = whole != 0
    torch.testing.assert_close(whole[kept], x[kept] / 0.7, rtol=1e-15, atol=0)


def test_a_mask_of_part_of_the_features_is_that_part() -> None:
    ids, x_TF = torch.arange(40, 64)[None], torch.randn(24, 12, dtype=torch.float64)
    drop = dropout(ids).of_adapters("layers.0", ("o_proj",), 0.3)["o_proj"]
    whole_TF = drop.whole(x_TF)
    assert 0.2 < (whole_TF == 0).double().mean() < 0.4
    halves = [drop.part(x_TF[:, first : first + 6], first) for first in (0, 6)]
    assert torch.equal(torch.cat(halves, dim=1), whole_TF)
    x_TF.requires_grad_()
    (drop.part(x_TF[:, 6:], 6).sum()).backward()
    assert x_TF.grad is not None
    assert torch.equal(x_TF.grad[:, 6:] != 0, whole_TF[:, 6:] != 0)


def test_head_mask_does_not_depend_on_how_heads_and_rows_are_sharded() -> None:
    ids = torch.arange(10).view(2, 5)
    x = torch.ones(2, 4, 5, 5)
    drop = dropout(ids).heads(0.4, "site", 0, 4)
    whole = drop.between(x, ids, ids)
    by_head = [drop.after(n).between(x[:, :2], ids, ids) for n in (0, 2)]
    rows = [ids[r : r + 1] for r in range(2)]
    by_row = [dropout(row).heads(0.4, "site", 0, 4).between(x[:1], row, row) for row in rows]
    late = drop.between(x[:, :, 3:, :2], ids[:, 3:], ids[:, :2])
    assert torch.equal(late, whole[:, :, 3:, :2])
    assert torch.equal(torch.cat(by_head, dim=1), whole)
    assert torch.equal(torch.cat(by_row), whole)
    assert len({tuple(m.flatten().tolist()) for m in whole.flatten(0, 1)}) == 8


def test_seed_step_and_site_change_the_mask() -> None:
    ids = torch.arange(64).view(1, 64)
    x = torch.ones(64, 64)
    masks = [
        dropout(ids).at("a")(x, 0.5),
        dropout(ids).at("b")(x, 0.5),
        dropout(ids, step=3).at("a")(x, 0.5),
        dropout(ids, seed=2).at("a")(x, 0.5),
    ]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (one == other).double().mean() < 0.6
