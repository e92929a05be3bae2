"""How long matrices are orthogonalised, and how that is divided among ranks."""

from dataclasses import replace
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.counts.matrices import MatrixAssignment, layer_matrices
from fivefold.counts.parameters import parameter_records
from fivefold.layout import Layout
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.data_parallel.muon import orthogonalising_seconds
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict

CLUSTER = load_cluster("H100", 64)
MODEL = replace(resolve_model("llama3-8b"), num_layers=8)
EXPERTS = replace(resolve_model("qwen3-30b-a3b"), num_layers=4)


def planned(model: Any, ranks: int, **settings: Any) -> Layout:
    given = {"optimizer": "muon", "precision": "bf16", "global_batch_size": 64} | settings
    return check(Config(model).with_values(**given), ranks)


def seconds(layout: Layout) -> float:
    return orthogonalising_seconds(layout, CLUSTER, layout.split.stages)


@pytest.mark.parametrize("model", [MODEL, EXPERTS])
def test_work_is_divided_where_state_is(model: Any) -> None:
    """Replicas each do all of it; ranks that share state do it in little more than equal parts."""
    alone = seconds(planned(model, 1))
    assert seconds(planned(model, 8)) == alone
    shared = seconds(planned(model, 8, data_parallel_sharding_strategy="optim"))
    assert alone / 8 < shared < alone / 4


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_busiest_rank_has_as_much_as_is_dealt_out_to_it(ranks: int) -> None:
    """Predicted work is that of the rank to which most is assigned, within a matrix."""
    layout = planned(MODEL, ranks, data_parallel_sharding_strategy="optim_grads")
    (holders, matrices), _ = layer_matrices(layout, parameter_records(layout, 0)).values()
    loads = [0] * holders
    for matrix, owner in (
        each for assigned in MatrixAssignment.of(matrices, holders).rounds for each in assigned
    ):
        loads[owner] += matrix.work
    largest = max(matrix.work for matrix in matrices)
    even = max(sum(loads) / holders, largest)
    assert even <= max(loads) <= even + largest


def test_a_step_is_longer_by_it_and_its_state_half_as_much() -> None:
    muon = planned(MODEL, 8, data_parallel_sharding_strategy="optim")
    adam = check(muon.config.with_values(optimizer="adam"), 8)
    longer = predict(muon, CLUSTER).step_time - predict(adam, CLUSTER).step_time
    assert longer == pytest.approx(seconds(muon), rel=0.2)
    state = [peak_memory(each, CLUSTER).ranks[0].parts["optimizer"] for each in (muon, adam)]
    embeddings = 2 * MODEL.padded_vocab_size * MODEL.hidden_size
    matrices = state[1] / 8 - embeddings / 8
    assert state[0] == pytest.approx(4 * matrices + 8 * embeddings / 8, rel=1e-3)
