"""The closed forms against figures that were worked out, or published, elsewhere."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from fivefold.check import check
from fivefold.config.presets import PRESETS
from fivefold.config.sources import read_config
from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.messages import PassVolumes, context_volumes
from fivefold.counts.volumes import step_volumes
from fivefold.description.expert_rows import rows_sent
from fivefold.pipeline.schedules.registry import SCHEDULES


def _both(volumes: PassVolumes) -> float:
    return volumes.forward + volumes.backward


def test_a_ring_sends_three_blocks_forward_and_six_backward_on_four_ranks() -> None:
    sent = context_volumes("p2p", 4, query=64, key_value=16, element=4, grad_element=4)
    assert (sent.forward, sent.backward) == (3 * 64, 6 * 64)


def test_ulysses_beats_gathering_beyond_two_thirds_of_the_group_size() -> None:
    for groups in (2, 4, 8):  # query heads per key/value head, of 8
        for ranks in (2, 4, 8):
            sizes = {
                "query": 16.0 * groups,
                "key_value": 16.0,
                "element": 2,
                "grad_element": 2,
                "key_value_heads": 8,
            }
            ulysses = context_volumes("a2a", ranks, **sizes)
            gathered = context_volumes("all_gather", ranks, **sizes)
            assert (_both(ulysses) < _both(gathered)) == (ranks > 2 * (groups + 1) / 3)


def test_hierarchical_attention_has_ulysses_and_the_ring_as_its_ends() -> None:
    sizes = {
        "query": 512.0,
        "key_value": 128.0,
        "element": 2,
        "grad_element": 4,
        "key_value_heads": 8,
    }
    for inner, end in ((8, "a2a"), (1, "p2p")):
        mixed = context_volumes("a2a+p2p", 8, inner=inner, **sizes)
        assert mixed == context_volumes(end, 8, **sizes)


@pytest.mark.parametrize(
    ("ranks", "naive", "once", "gathered"),
    [(4, 6.00, 2.71, 3), (8, 7.00, 4.63, 7), (16, 7.50, 6.12, 15), (64, 7.88, 7.56, 63)],
)
def test_rows_sent_for_256_experts_of_which_8_are_chosen(
    ranks: int, naive: float, once: float, gathered: int
) -> None:
    model = replace(PRESETS["mixtral-8x7b"], num_experts=256, moe_router_topk=8)
    assert rows_sent("alltoall", model, ranks) == pytest.approx(naive, abs=0.005)
    assert rows_sent("flex", model, ranks) == pytest.approx(once, abs=0.005)
    assert rows_sent("allgather", model, ranks) == gathered


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_router_with_groups_reaches_as_many_ranks_as_counted(ranks: int) -> None:
    routing = {"moe_router_topk": 6, "moe_router_num_groups": 8, "moe_router_group_topk": 3}
    model = replace(PRESETS["mixtral-8x7b"], num_experts=64, **routing)
    draw = random.Random(0)
    reached = 0
    for _ in range(4000):
        groups = draw.sample(range(8), 3)
        chosen = draw.sample([8 * group + expert for group in groups for expert in range(8)], 6)
        reached += len({expert * ranks // 64 for expert in chosen})
    expected = reached / 4000 * (1 - 1 / ranks)
    assert rows_sent("flex", model, ranks) == pytest.approx(expected, rel=0.02)


def test_experts_are_sent_to_and_sharded_on_their_own_mesh() -> None:
    config = read_config(
        model="mixtral-8x7b",
        expert_model_parallel_size=8,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        global_batch_size=16,
        data_parallel_sharding_strategy="optim",
    )
    sizes: Counter[str] = Counter()
    for flow in step_volumes(check(config, 32, planned=True), 0):
        sizes[flow.purpose] += flow.size  # type: ignore[assignment]
    tokens, h, layers = config.training.seq_length / 2, 4096, 32
    sent = 2 * 7 / 8 * tokens * layers
    assert sizes["tokens to experts and back"] == 4 * sent * h * 2
    assert sizes["weights of rows"] == 2 * sent * 4
    assert sizes["numbers of rows"] == 7 * 8 * layers
    experts = 32 * 3 * 4096 * 14336
    assert sizes["reduced gradients of experts"] == 3 / 4 * experts * 4
    assert sizes["gathered experts"] == 3 / 4 * experts * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_sends_what_its_program_says(schedule: str) -> None:
    slices = 2 if SCHEDULES[schedule].slices else 1
    config = read_config(
        "debug",
        num_layers=8,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        num_sequence_slices=slices,
        global_batch_size=24,
        mtp_num_layers=0 if slices > 1 else 1,
    )
    layout = check(config, 4)
    tokens = config.training.micro_batch_size * config.training.seq_length // slices
    one = tokens * config.model.hidden_size * ELEMENT_BYTES[config.training.precision]
    sent: Counter[int] = Counter()
    for message in layout.program().messages:
        into = max(message.src_stage, message.dst_stage)
        sent[message.src_rank] += one * layout.states_into(into)
    for rank in range(4):
        flows = step_volumes(layout, rank)
        states = [flow.size for flow in flows if flow.purpose == "hidden states and gradients"]
        assert states == [sent[rank]]
