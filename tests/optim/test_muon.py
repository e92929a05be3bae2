"""Muon's arithmetic, and how matrices are assigned to ranks."""

from dataclasses import replace
from itertools import cycle, islice
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.training import OptimizerConfig
from fivefold.counts.matrices import ROUND, Matrix, MatrixAssignment, layer_matrices
from fivefold.counts.parameters import parameter_records
from fivefold.errors import FivefoldError
from fivefold.layout import Layout
from fivefold.optim.muon import QUINTIC, MuonAdamW, orthogonalised
from fivefold.optim.schedule import StepRates
from tests.verify.cases import MIXTURE, MODELS, config

SMALL = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(SMALL, max_size=1), SMALL, SMALL, SMALL, st.integers(1, 9), st.integers(0, 99))
def test_singular_vectors_stay_and_values_follow_the_polynomials(
    batch: list[int], rows: int, columns: int, rank: int, steps: int, seed: int
) -> None:
    """By a singular value decomposition, which the iterations do without."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(*batch, *size, generator=draw, dtype=torch.float64)
        for size in ((rows, rank), (rank, columns))
    )
    x = left @ right
    vectors, values, others = torch.linalg.svd(x, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in islice(cycle(QUINTIC), steps):
        values = a * values + b * values**3 + c * values**5
    expected = vectors @ torch.diag_embed(values) @ others
    # Values that are zero but for rounding grow by less than five in an iteration.
    tolerance = 1e-14 * 5.0**steps
    torch.testing.assert_close(
        orthogonalised(x, steps, torch.float64), expected, rtol=tolerance, atol=tolerance
    )


def test_a_zero_matrix_stays_zero() -> None:
    """That of an expert without tokens, beside another's."""
    x = torch.zeros(2, 3, 4)
    x[1] = 1e-12
    found = orthogonalised(x, 5, torch.bfloat16)
    assert not found[0].any()
    assert found[1].norm() > 0.5


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("original", {"muon_scale_mode": "shape_scaling"}),
        ("match_rms_adamw", {"muon_extra_scale_factor": 0.2}),
    ],
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_torch(
    theirs: str, ours: dict[str, Any], nesterov: bool, shape: tuple[int, int]
) -> None:
    """In one iteration, of which torch's have other coefficients, and in bf16, as its own."""
    settings = OptimizerConfig(
        optimizer="muon", muon_nesterov=nesterov, muon_num_ns_steps=1, weight_decay=0.1, **ours
    )
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=draw)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    whole = Matrix("w", shape)
    optimizer = MuonAdamW({"w": mine}, settings, [([whole], 1, None)], torch.bfloat16)
    reference = torch.optim.Muon(
        [other],
        lr=0.05,
        weight_decay=0.1,
        momentum=settings.muon_momentum,
        nesterov=nesterov,
        ns_coefficients=QUINTIC[0],
        ns_steps=1,
        adjust_lr_fn=theirs,
    )
    for _ in range(3):
        grad = torch.randn(shape, generator=draw)
        mine.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step(StepRates(0.05, 0.05, 0.1))
        reference.step()
        scale = (other - start).abs().max()
        assert ((mine - other).abs().max() / scale) < 2.0**-7


def test_what_is_not_finite_leaves_every_bit() -> None:
    shape = (4, 6)
    weights = {"layers.0.w.weight": shape, "norm.weight": shape[:1]}
    held = {name: nn.Parameter(torch.ones(size)) for name, size in weights.items()}
    whole = Matrix("layers.0.w.weight", shape)
    muon = OptimizerConfig(optimizer="muon", muon_nesterov=True)
    optimizer = MuonAdamW(held, muon, [([whole], 1, None)], torch.bfloat16)

    def step(value: float, found: float) -> dict[str, torch.Tensor]:
        for parameter in held.values():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(StepRates(0.1, 0.1, 0.1), torch.tensor(found))
        state = {name: piece.local for name, piece in optimizer.state_tensors().items()}
        return {name: tensor.detach().clone() for name, tensor in (held | state).items()}

    before = step(1.0, 0.0)
    assert set(before) - set(held) == {
        "optim.exp_avg.layers.0.w.weight",
        "optim.exp_avg.norm.weight",
        "optim.exp_avg_sq.norm.weight",
    }
    after = step(float("nan"), 1.0)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(step(1.0, 0.0)["norm.weight"], before["norm.weight"])


LAYOUTS = [
    ("llama", 8, {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}),
    ("llama", 4, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    ("latent", 2, {"tensor_model_parallel_size": 2}),
    (
        "mixture",
        8,
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
]


def laid_out(model: str, ranks: int, values: dict[str, Any]) -> Layout:
    shapes = MIXTURE if model == "mixture" else MODELS[model]
    return check(config(shapes, ranks, optimizer="muon", **values), ranks)


@pytest.mark.parametrize(("model", "ranks", "values"), LAYOUTS)
def test_every_matrix_is_put_together_once_from_parts_that_are_all_of_it(
    model: str, ranks: int, values: dict[str, Any]
) -> None:
    layout = laid_out(model, ranks, values)
    split = 0
    for holders, matrices in layer_matrices(layout, parameter_records(layout, 0)).values():
        assignment = MatrixAssignment.of(matrices, holders)
        assigned = [matrix.name for each in assignment.rounds for matrix, _ in each]
        assert sorted(assigned) == sorted(m.name for m in matrices if m.is_split)
        split += len(assigned)
        for matrix in matrices:
            seen, held = torch.zeros(2, *matrix.shape, dtype=torch.int64)
            for rank in range(holders):
                held[matrix.box(rank)] += 1
                seen[matrix.box(rank)] += matrix.sends(rank)
                assert held[matrix.box(rank)].numel() == matrix.size(rank)
            assert torch.equal(seen, torch.ones_like(seen))
            assert matrix.is_split == (matrix.size(0) < prod(matrix.shape))
        # What is put together has been sent or was there, and goes back to all who hold it.
        gathered = returned = 0
        for matrix, owner in (each for assigned in assignment.rounds for each in assigned):
            others = [rank for rank in range(holders) if rank != owner]
            gathered += sum(matrix.size(rank) * matrix.sends(rank) for rank in others)
            returned += sum(map(matrix.size, others))
        assert gathered == sum(map(assignment.gathered, range(holders)))
        assert returned == sum(map(assignment.returned, range(holders)))
    assert split


@pytest.mark.parametrize("side", [1 << 3, 1 << 13])
@pytest.mark.parametrize("count", [3, 8, 61])
def test_work_is_even_and_little_is_whole_at_once(count: int, side: int) -> None:
    """No rank has more than a matrix more than another, in small and in large ones."""
    ranks = 4
    assignment = MatrixAssignment.of(
        [Matrix(f"{n}", (side, side), shards=ranks) for n in range(count)], ranks
    )
    owners = [owner for assigned in assignment.rounds for _, owner in assigned]
    loads = [owners.count(rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1
    for assigned in assignment.rounds:
        for rank in range(ranks):
            whole = [prod(matrix.shape) for matrix, owner in assigned if owner == rank]
            assert len(whole) < 2 or sum(whole) <= ROUND
    assert len(assignment.rounds) == (-(-count // ranks) if side * side > ROUND else 1)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer_cpu_offload": True},
        {"offload_optimizer_states": True},
        {"use_precision_aware_optimizer": True},
    ],
)
def test_state_of_adamw_alone_is_refused(values: dict[str, Any]) -> None:
    given = config(MODELS["llama"], 1, optimizer="muon", **values)
    (name,) = values
    with pytest.raises(FivefoldError, match=name):
        check(given, 1)
    check(Config(model=given.model).with_values(**values, optimizer="adam"), 1)


def test_embeddings_and_the_head_are_no_matrices_of_layers() -> None:
    layout = check(replace(config(MODELS["gpt"], 1, optimizer="muon")), 1)
    records = parameter_records(layout, 0)
    apart = {r.name for r in records if not r.orthogonal and len(r.shape) > 1}
    assert apart == {"embed_tokens.weight", "embed_positions.weight"}
