"""Kernels and collectives: limits that hold whatever the constants are."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from fivefold.hardware import GPUS
from fivefold.predict.cluster import preset
from fivefold.predict.step import predict
from fivefold.predict.times.communication import (
    GroupSpan,
    all_reduce,
    all_to_all,
    gather,
    send,
    span,
)
from fivefold.predict.times.compute import Phases, attention, elementwise, matmul, overlapped
from tests.predict.layouts import planned

GPU = GPUS["H100"]
CLUSTER = preset("H100", 1024)


def test_large_multiplications_approach_the_sustained_rate():
    m = n = k = 16384
    rate = 2 * m * n * k / matmul(GPU, m, n, k, "bf16")
    assert 0.9 < rate / (GPU.matmul.bf16 * GPU.sustained) <= 1


def test_a_wave_that_is_begun_costs_nearly_a_whole_one():
    small = replace(GPU, launch=0.0, multiprocessors=8, memory_bandwidth=1e15)
    full = matmul(small, 8 * 256, 128, 8192, "bf16")
    begun = matmul(small, 9 * 256, 128, 8192, "bf16")
    assert begun > 1.5 * full


def test_thin_multiplications_take_what_their_operands_take_from_memory():
    time = matmul(GPU, 1, 16384, 16384, "bf16")
    assert time >= 2 * 16384**2 / GPU.memory_bandwidth


def test_no_rate_exceeds_the_peak():
    for m in (1, 100, 4096, 20000):
        time = matmul(GPU, m, 4096, 4096, "fp8")
        assert 2 * m * 4096 * 4096 / time < GPU.peak.of("fp8")
    times = attention(GPU, 1e15, 8192)
    assert 1e15 / times.forward < GPU.peak.bf16
    assert 2.5e15 / times.dx < GPU.peak.bf16


def test_a_device_without_eight_bit_units_multiplies_in_bf16():
    a100 = GPUS["A100-80"]
    assert a100.matmul.of("fp8") == a100.matmul.bf16


def test_phases_add_and_scale():
    total = Phases(1, 2, 3) + Phases(1, 1, 1) * 2
    assert (total.forward, total.dx, total.dw, total.total) == (3, 4, 5, 12)


def test_overlap_costs_a_share_of_what_is_hidden_and_all_of_the_rest():
    assert overlapped(GPU, 5.0, 2.0) == pytest.approx(2 * GPU.overlap_slowdown)
    assert overlapped(GPU, 2.0, 5.0) == pytest.approx(3 + 2 * GPU.overlap_slowdown)
    assert overlapped(GPU, 1.0, 0.0) == 0


def test_groups_lie_where_their_stride_puts_them():
    assert span(CLUSTER, 8, 1) == GroupSpan(8, 8)
    assert span(CLUSTER, 64, 2) == GroupSpan(64, 4)
    assert span(CLUSTER, 64, 8) == GroupSpan(64, 1)
    assert span(CLUSTER, 64, 2).nodes == 16


def test_a_group_is_as_well_placed_as_the_one_with_fewest_ranks_in_a_node():
    """Also where GPUs of a node, ranks of a group and their distance do not divide each other."""
    draw = random.Random(0)
    for _ in range(400):
        each, (size, stride, groups) = draw.randint(1, 8), (draw.randint(1, 13) for _ in range(3))
        cluster = replace(CLUSTER, gpus_per_node=each, num_gpus=size * stride * groups)
        nodes = (
            Counter((first + place * stride) // each for place in range(size))
            for group in range(groups)
            for first in range(group * size * stride, group * size * stride + stride)
        )
        fewest = min(number for counts in nodes for number in counts.values())
        assert span(cluster, size, stride) == GroupSpan(size, fewest), (each, size, stride, groups)
    # Of a rack's hosts a job takes as many as divide its groups.
    assert span(preset("GB200", 256), 64, 1) == GroupSpan(64, 64)


@pytest.mark.parametrize(("each", "tp"), [(6, 4), (5, 2), (3, 2), (7, 4)])
def test_tensor_parallel_ranks_of_two_nodes_talk_over_the_network(each: int, tp: int) -> None:
    """As slow as if nodes had as many GPUs as the smaller part of such a group."""
    layout = planned("llama3-8b", 8 * tp, tp=tp, sp=True, gbs=32)
    cluster = replace(CLUSTER, num_gpus=8 * tp)
    odd, part, whole = (
        predict(layout, replace(cluster, gpus_per_node=gpus)).parts for gpus in (each, tp // 2, tp)
    )
    sent = [
        sum(part.seconds for part in parts if part.name == "TP communication")
        for parts in (odd, part, whole)
    ]
    assert sent[0] >= 0.9 * sent[1] > 2 * sent[2]


def test_collectives_cost_what_their_bytes_and_links_say():
    size = 1e9
    inside, across = span(CLUSTER, 8, 1), span(CLUSTER, 64, 8)
    assert gather(CLUSTER, inside, size) == pytest.approx(
        7 / 8 * size / CLUSTER.node_link.rate, rel=0.02
    )
    assert gather(CLUSTER, across, size) == pytest.approx(
        63 / 64 * size / CLUSTER.network_link.rate, rel=0.02
    )
    # Four GPUs of each node share the work of the network.
    assert gather(CLUSTER, span(CLUSTER, 64, 2), size) < 0.3 * gather(CLUSTER, across, size)
    for group in (inside, across):
        assert all_reduce(CLUSTER, group, size) == pytest.approx(2 * gather(CLUSTER, group, size))
        assert all_reduce(CLUSTER, group, 8.0) <= 2 * gather(CLUSTER, group, 8.0)
    alone = span(CLUSTER, 1, 1)
    assert gather(CLUSTER, alone, size) == all_reduce(CLUSTER, alone, size) == 0
    assert all_to_all(CLUSTER, alone, size, 0) == 0


def test_an_empty_ring_visits_every_rank():
    inside, across = CLUSTER.node_link.latency, CLUSTER.network_link.latency
    assert gather(CLUSTER, span(CLUSTER, 64, 1), 0.0) == pytest.approx(56 * inside + 7 * across)
    assert gather(CLUSTER, span(CLUSTER, 8, 8), 0.0) == pytest.approx(7 * across)


def test_attention_runs_at_the_rate_of_its_precision():
    narrow, single = (attention(GPU, 1e15, 8192, kind) for kind in ("bf16", "fp32"))
    ratio = GPU.peak.of("bf16") / GPU.peak.of("fp32")
    assert single.forward / narrow.forward == pytest.approx(ratio, rel=1e-3)


def test_both_kinds_of_link_deal_out_tokens_at_once():
    group = span(CLUSTER, 16, 1)
    slow = all_to_all(CLUSTER, group, 0, 1e9)
    assert all_to_all(CLUSTER, group, 1e8, 1e9) == pytest.approx(slow)
    assert slow == pytest.approx(1e9 / CLUSTER.network_link.rate, rel=0.01)


def test_messages_take_the_link_between_their_ends():
    assert send(CLUSTER, 4, 1e9) < send(CLUSTER, 8, 1e9) / 5
    assert elementwise(GPU, 0.0) == GPU.launch
