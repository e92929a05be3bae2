"""The time of a step: what must hold between layouts, and how fast it is told."""

from dataclasses import replace
from itertools import product

import pytest

from fivefold.counts.volumes import step_volumes
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.simulate import simulate
from fivefold.predict.cluster import Link, preset
from fivefold.predict.program.makespan import Clock, leveled_program
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from tests.predict.layouts import planned
from tests.speed import usual_seconds

CLUSTER = preset("H100", 64)
DENSE = planned("llama3-8b", 64, tp=4, sp=True, pp=2, mbs=2, gbs=512)


def part(prediction, name):
    return next(p.seconds for p in prediction.parts if p.name == name)


def test_the_waterfall_adds_up_and_nothing_in_it_is_negative():
    layouts = (
        DENSE,
        planned("llama3-8b", 64, cp=4, zero="optim_grads_params"),
        planned("llama3-8b", 64, pp=4, virtual=2, gbs=256, recompute_granularity="full"),
        planned("mixtral-8x7b", 64, pp=2, ep=8, gbs=256),
        planned("deepseek-v3", 256, ep=32, gbs=1024, fp8_format="hybrid"),
    )
    for layout in layouts:
        prediction = predict(layout, preset("H100", layout.grid.world_size))
        assert sum(p.seconds for p in prediction.parts) == pytest.approx(prediction.step_time)
        assert min(p.seconds for p in prediction.parts) > -1e-9 * prediction.step_time
        assert prediction.low < prediction.step_time < prediction.high
        assert 0.05 < prediction.mfu < 0.75


def test_tokens_flops_and_mfu_are_of_the_same_step():
    prediction = predict(DENSE, CLUSTER)
    tokens = prediction.tokens_per_second_per_gpu * 64 * prediction.step_time
    assert tokens == pytest.approx(512 * 4096)
    flops = prediction.mfu * prediction.step_time * 64 * CLUSTER.gpu.peak.bf16
    assert flops == pytest.approx(prediction.model_flops)
    assert prediction.model_flops / tokens == pytest.approx(6 * 8e9, rel=0.15)


def test_the_simulation_is_of_the_whole_program():
    prediction = predict(DENSE, CLUSTER)
    inside = prediction.step_time - sum(
        part(prediction, name) for name in ("DP communication", "optimizer", "jitter")
    )
    assert prediction.simulation.makespan == pytest.approx(inside, rel=1e-3)


@pytest.mark.parametrize(
    "schedule, ranks, virtual",
    [
        ("1f1b", 4, 1),
        ("eager_1f1b", 4, 1),
        ("gpipe", 4, 1),
        ("interleaved_1f1b", 4, 3),
        ("zb_h1", 4, 1),
        ("zb_v", 4, 2),
        ("v_half", 4, 2),
        ("dualpipe_v", 4, 2),
        ("dualpipe", 4, 1),
    ],
)
def test_a_short_program_tells_the_time_of_a_long_one(schedule, ranks, virtual):
    shape = "v:" if schedule in ("zb_v", "v_half", "dualpipe_v") else ""
    stages = ranks * virtual
    layout = planned(
        "llama3-8b",
        ranks,
        pp=ranks,
        gbs=64,
        pipeline_schedule=schedule,
        pipeline_model_parallel_layout=shape
        + "Et|"
        + "ttt|" * (stages - 2)
        + "t" * (31 - 3 * (stages - 2))
        + "L",
    )
    costs = predict(layout, CLUSTER).costs
    for eager in (False, True):
        program = executed(layout.order().program(), pairs=False, eager=eager)
        whole = simulate(program, costs).makespan
        assert Clock.of(layout, eager=eager).walk([costs], [])[0][0] == pytest.approx(
            whole, rel=2e-3
        )
        table = leveled_program(layout.order(64), pairs=False, eager=eager)
        assert table.makespans([costs])[0] == pytest.approx(whole)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_a_limit_on_what_is_held_is_paid_for_in_forwards(schedule, limit):
    virtual = 1 if schedule == "1f1b" else 2
    shape = {"pp": 8, "gbs": 200, "virtual": virtual, "pipeline_schedule": schedule}
    plain = planned("llama3-8b", 8, **shape)
    layout = planned("llama3-8b", 8, recompute_in_flight_limit=limit, **shape)
    prediction = predict(layout, CLUSTER)
    costs = prediction.costs
    program = layout.order().executed(pairs=False, eager=True)
    whole = simulate(program, costs)
    table = leveled_program(layout.order(), pairs=False, eager=True)
    assert table.makespans([costs])[0] == pytest.approx(whole.makespan)
    assert Clock.of(layout, eager=True).walk([costs], [])[0][0] == pytest.approx(
        whole.makespan, rel=0.012
    )
    again = sum(count * costs.f[stage] for stage, count in layout.recomputed().items()) / 8
    assert part(prediction, "recompute") == pytest.approx(again, rel=0.06)
    assert prediction.step_time >= predict(plain, CLUSTER).step_time  # in bubbles it is free
    assert sum(p.seconds for p in prediction.parts) == pytest.approx(prediction.step_time)
    assert min(p.seconds for p in prediction.parts) > -1e-9 * prediction.step_time


def test_slower_machines_make_slower_steps():
    for change in (
        {"node_link": replace(CLUSTER.node_link, bandwidth=CLUSTER.node_link.bandwidth / 4)},
        {"network_link": replace(CLUSTER.network_link, latency=1e-2)},
        {"gpu": replace(CLUSTER.gpu, sustained=CLUSTER.gpu.sustained / 2)},
        {"gpu": replace(CLUSTER.gpu, memory_efficiency=0.2)},
        {"jitter": 0.1},
        {"host_operation": 1e-3},
    ):
        assert (
            predict(DENSE, replace(CLUSTER, **change)).step_time > predict(DENSE, CLUSTER).step_time
        )


def test_full_recomputation_runs_every_forward_again():
    plain = planned("llama3-8b", 8, tp=1)
    full = planned("llama3-8b", 8, tp=1, recompute_granularity="full")
    half = planned(
        "llama3-8b",
        8,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=(16,),
    )
    times = [predict(layout, CLUSTER) for layout in (plain, half, full)]
    again = [part(time, "recompute") for time in times]
    assert again[0] == 0
    assert again[1] == pytest.approx(again[2] / 2)
    assert 0.2 < again[2] / times[0].step_time < 0.34


def test_selective_recomputation_costs_less_than_full_and_more_than_none():
    modules = ("core_attn", "mlp", "layernorm")
    selective = planned(
        "llama3-8b", 8, recompute_granularity="selective", recompute_modules=modules
    )
    full = planned("llama3-8b", 8, recompute_granularity="full")
    own = part(predict(selective, CLUSTER), "recompute")
    assert 0 < own < part(predict(full, CLUSTER), "recompute")


@pytest.mark.parametrize("recomputed", [None, "full", "selective"])
def test_a_sum_joined_with_its_norm_saves_passes_unless_the_norm_is_made_again(recomputed):
    apart, joined = (
        predict(
            planned(
                "llama3-8b",
                8,
                mbs=1,
                recompute_granularity=recomputed,
                fused_residual_rmsnorm=fused,
            ),
            preset("H100", 8),
        ).step_time
        for fused in (False, True)
    )
    assert joined == apart if recomputed == "selective" else joined < apart


def test_the_bubble_shrinks_with_microbatches_and_interleaving():
    def bubble(**settings):
        prediction = predict(planned("llama3-8b", 8, pp=4, zero="no_shard", **settings), CLUSTER)
        return part(prediction, "bubble") / prediction.step_time

    assert bubble(gbs=128) < bubble(gbs=16)
    assert bubble(gbs=16, virtual=2) < bubble(gbs=16)


def test_eager_dx_shortens_the_bubble():
    fused = predict(DENSE, CLUSTER, Software(eager_dx=False))
    eager = predict(DENSE, CLUSTER, Software(eager_dx=True))
    assert part(eager, "bubble") < part(fused, "bubble")


def test_buckets_cost_their_latency_and_their_last_one():
    """Many messages wait for the network's latency; a single one for the whole backward."""

    def seconds(size, **settings):
        layout = planned(
            "llama3-8b", 16, zero="no_shard", precision="fp32", ddp_bucket_size=size, **settings
        )
        return part(predict(layout, CLUSTER), "DP communication")

    apart = {"overlap_grad_reduce": False}
    assert seconds(1, **apart) > seconds(100_000_000, **apart) > seconds(1 << 40, **apart)
    assert seconds(100_000_000) < seconds(1 << 40)


def test_sums_in_fp32_of_what_is_sent_in_bf16_cost_more_between_nodes():
    """Each rank sends its parts over its own NIC; a ring adds up the parts of a node first."""

    def seconds(gpus, **settings):
        layout = planned(
            "llama3-8b", gpus, tp=1, zero="optim", grad_reduce_in_bf16=True,
            overlap_grad_reduce=False, **settings,
        )  # fmt: skip
        return part(predict(layout, CLUSTER), "DP communication")

    wide = {"ddp_reduce_scatter_with_fp32_accumulation": True}
    assert seconds(64, **wide) > 2 * seconds(64)
    assert seconds(8, **wide) == pytest.approx(seconds(8), rel=0.05)


@pytest.mark.parametrize("zero", ["no_shard", "optim"])
@pytest.mark.parametrize("model", ["debug-llama", "debug-mixtral"])
def test_data_parallel_messages_take_what_their_bytes_do(model, zero):
    """Where links are all the same, have no latency, and nothing hides: as an audit counts bytes,
    for each way in which ranks share state, experts of few ranks included."""
    link = Link(1e6, 0.0, 1.0)
    cluster = replace(CLUSTER, gpus_per_node=1, node_link=link, network_link=link)
    apart = {"overlap_grad_reduce": False, "overlap_param_gather": False, "precision": "bf16"}
    moe = model == "debug-mixtral"
    for instances, ep, tp in product((1, 2, 4, 8), (1, 2, 8) if moe else (1,), (1, 2)):
        if instances > 1 and (zero == "no_shard" or 8 % (instances * tp)):
            continue
        way = {"tp": tp, "sp": tp > 1, "num_distributed_optimizer_instances": instances}
        way |= {"expert_model_parallel_size": ep} if moe else {}
        layout = planned(model, 8, zero=zero, seq=64, gbs=8, **way, **apart)
        sent = sum(
            flow.size
            for flow in step_volumes(layout, 0)
            if flow.purpose.startswith(("gathered", "reduced", "gradients of"))
            and "replicated" not in flow.purpose
        )
        seconds = part(predict(layout, cluster), "DP communication")
        assert seconds == pytest.approx(sent / link.rate, rel=0.02), way


def test_the_update_of_other_layers_hides_the_first_gather():
    def exposed(**settings):
        layout = planned("llama3-8b", 64, tp=1, zero="optim", **settings)
        return part(predict(layout, CLUSTER), "DP communication")

    assert exposed(overlap_param_gather_with_optimizer_step=True) < exposed()


def test_overlap_hides_communication():
    def exposed(name, model="llama3-8b", **settings):
        return part(predict(planned(model, 64, **settings), CLUSTER), name)

    tp = {"tp": 8, "sp": True}
    assert exposed("TP communication", **tp, tp_comm_overlap=True) < exposed(
        "TP communication", **tp
    )
    assert exposed("DP communication") < exposed("DP communication", overlap_grad_reduce=False)
    ep = {"model": "mixtral-8x7b", "ep": 8, "gbs": 512}
    assert exposed("EP communication", **ep, overlap_moe_expert_parallel_comm=True) < exposed(
        "EP communication", **ep
    )


def test_one_gpu_has_neither_bubble_nor_communication():
    prediction = predict(planned("llama3-8b", 1, gbs=4, zero="no_shard"), preset("H100", 1))
    for name in ("bubble", "TP communication", "PP communication", "jitter"):
        assert part(prediction, name) == pytest.approx(0, abs=1e-9)


def test_what_no_published_run_covers_is_said_and_widens_the_interval():
    seen = predict(DENSE, CLUSTER)
    unseen = predict(DENSE, preset("MI300X", 64))
    assert not seen.notes
    assert any("MI300X" in note for note in unseen.notes)
    assert unseen.high / unseen.step_time > seen.high / seen.step_time


def test_gathering_each_tensor_by_itself_takes_longer():
    layout = planned("llama3-8b", 64, gbs=64, data_parallel_sharding_strategy="optim")
    one, many = (
        part(predict(layout, CLUSTER, Software(by_tensor=apart)), "DP communication")
        for apart in (False, True)
    )
    assert many > one


@pytest.mark.slow
def test_two_hundred_large_layouts_take_less_than_four_seconds():
    layout = planned(
        "llama3-405b",
        1024,
        tp=8,
        sp=True,
        pp=16,
        virtual=8,
        gbs=1024,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    cluster = preset("H100", 1024)
    predict(layout, cluster)

    four = usual_seconds(lambda: [predict(layout, cluster) for _ in range(4)], repeat=7)
    assert four < 4 / 50


def test_copies_to_the_host_hide_behind_their_layer_or_are_waited_for():
    settings = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
    layout = planned("llama3-8b", 64, gbs=64, **settings)
    slow = replace(CLUSTER, host_bandwidth=CLUSTER.host_bandwidth / 100)
    waits, stuck = (part(predict(layout, c), "offloading") for c in (CLUSTER, slow))
    # Queries, keys, values and results of 32 layers, there and back.
    model, training = layout.config.model, layout.config.training
    moved = 32 * 2 * 2 * training.seq_length * (2 * model.q_size + model.k_size + model.v_size)
    work = predict(layout, slow).step_time - stuck
    assert waits == 0
    assert moved / slow.host_bandwidth - work <= stuck <= moved / slow.host_bandwidth
