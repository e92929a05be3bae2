"""Habits of other frameworks, against sums that can be done by hand."""

import pytest

from fivefold.description.kinds import LayerKind
from fivefold.predict.cluster import preset
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from fivefold.predict.times.communication import broadcasts, gather, span
from fivefold.predict.times.compute import attention, attention_share, matmul, score_matrices
from fivefold.predict.times.layer import LayerTimes, forward_operations
from tests.predict.layouts import planned

H100 = preset("H100", 64)


def recomputed(software, **settings):
    layout = planned("llama3-8b", 8, mbs=2, gbs=16, **settings)
    modules = layout.config.memory.recomputed_modules
    return LayerTimes(layout, H100, software).layer(LayerKind(), modules).recompute.dx


def test_a_layer_that_keeps_bf16_takes_as_long_as_one_of_a_model_in_bf16():
    narrow = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    first = LayerTimes(planned("llama3-8b", 8, tp=2), H100, Software())
    mixed = planned("llama3-8b", 8, tp=2, **narrow, first_last_layers_bf16=True)
    each = LayerTimes(mixed, H100, Software())
    assert each.layer(LayerKind(wide=True), ()) == first.layer(LayerKind(), ())
    whole = LayerTimes(planned("llama3-8b", 8, tp=2, **narrow), H100, Software())
    assert each.layer(LayerKind(), ()) == whole.layer(LayerKind(), ())
    assert whole.layer(LayerKind(), ()).total.total < first.layer(LayerKind(), ()).total.total


def test_older_attention_is_slower_where_the_silicon_asks_for_more():
    for name, share in (("A100-80", 1.0), ("H100", 0.65)):
        cluster = preset(name, 8)
        seen = Software(attention="flash2").on(cluster).gpu
        assert seen.attention_forward == pytest.approx(cluster.gpu.attention_forward * share)
        first = Software(attention="flash1").on(cluster).gpu
        assert first.attention_backward < seen.attention_backward
        assert Software().on(cluster) is cluster


def test_short_sequences_and_small_heads_reach_less_of_the_attention():
    assert attention_share(1 << 30, 128) == pytest.approx(1.0)
    assert attention_share(384, 128) == pytest.approx(0.5)
    assert attention_share(1 << 30, 64) == pytest.approx(64 / 96 * 160 / 128)


def test_faster_silicon_loses_more_of_a_shallow_multiplication():
    def lost(gpu):
        deep, shallow = (matmul(gpu, 8192, 8192, k, "bf16") / k for k in (1 << 16, 512))
        return shallow / deep

    assert lost(preset("A100-80").gpu) < lost(H100.gpu) < lost(preset("B200").gpu)


def test_keeping_every_second_multiplication_runs_the_others_again():
    asked = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}
    ours = recomputed(Software(keeps_every_second=True), **asked)
    gate, up = 14336, 14336
    # k, o and up of Llama 3 8B, where the modules would have run gate and up again
    share = (1024 + 4096 + up) / (gate + up)
    assert ours == pytest.approx(share * recomputed(Software(), **asked), rel=0.1)


def test_one_rate_for_all_links_bounds_a_step_by_its_bytes():
    layout = planned("llama3-8b", 64, zero="optim_grads_params", recompute_granularity="full")
    rate = 1e9  # so slow that nothing else counts
    habits = {"gather_rate": rate, "gradient_bytes": 2.0}
    once = predict(layout, H100, Software(**habits)).step_time
    thrice = predict(layout, H100, Software(**habits, gathers_to_recompute=True)).step_time
    gathered = layout.num_microbatches * 2 * 8.03e9 / rate
    assert thrice - once == pytest.approx(gathered, rel=0.02)


def test_waiting_for_messages_makes_every_stage_longer_by_one():
    layout = planned("llama3-8b", 64, tp=4, pp=4, gbs=256)
    hidden = predict(layout, H100).costs
    for when in ("always", "plain"):
        waiting = predict(layout, H100, Software(waits_for_hops=when)).costs
        assert waiting.f == pytest.approx([f + hidden.hop for f in hidden.f])
        assert waiting.b == pytest.approx([b + hidden.hop for b in hidden.b])
        assert waiting.hop == 0.0


def test_who_waits_in_plain_schedules_sends_beside_interleaved_stages():
    two = planned("llama3-8b", 64, tp=4, pp=4, gbs=256, num_virtual_stages_per_pipeline_rank=2)
    never, plain, always = (
        predict(two, H100, Software(waits_for_hops=when)).costs
        for when in ("never", "plain", "always")
    )
    assert plain == never and never.hop > 0
    assert always.f == pytest.approx([f + never.hop for f in never.f])


def test_scattered_messages_are_shorter():
    layout = planned("llama3-8b", 64, tp=4, pp=4, gbs=256)
    whole, scattered = (
        predict(layout, H100, Software(scatters_hops=habit)).costs.hop for habit in (False, True)
    )
    assert scattered < whole


def test_heads_that_tensor_cores_cannot_read_are_multiplied_without_them():
    gpu = preset("A100-80").gpu

    def seconds(head, kind="bf16"):
        return score_matrices(gpu, 64, 2048, (head, head), kind).total / head

    unread, read = seconds(150), seconds(152)
    assert 3 < unread / read < 10 and seconds(148) > 3 * read
    assert seconds(150, "fp32") == pytest.approx(seconds(152, "fp32"), rel=0.05)


def test_fused_attention_pads_heads_to_those_of_its_kernels():
    whole, padded = (attention(H100.gpu, 1e15 * head, 8192, head=head) for head in (96, 80))
    rates = attention_share(8192, 96) / attention_share(8192, 80)
    assert padded.forward / whole.forward == pytest.approx(rates, rel=1e-6)


def test_sums_that_every_rank_takes_move_twice_the_bytes():
    layout = planned("llama3-8b", 64, zero="optim", overlap_grad_reduce=False)

    def exposed(software):
        parts = {part.name: part.seconds for part in predict(layout, H100, software).parts}
        return parts["DP communication"]

    scattered, whole = exposed(Software()), exposed(Software(reduces_whole=True))
    assert whole - scattered == pytest.approx(4 * 8.03e9 * 63 / 64 / 320e9, rel=0.1)


def test_gradients_that_are_added_by_kernels_of_their_own_take_their_traffic():
    layout = planned("llama3-8b", 8, mbs=1, gbs=16)
    inside, ours, apart = (
        LayerTimes(layout, H100, Software(accumulates_apart=habit)).layer(LayerKind(), ())
        for habit in ("never", "grouped", "always")
    )
    weights = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336)
    traffic = 8 * weights / (3350e9 * 0.85)
    assert apart.compute.dw - inside.compute.dw == pytest.approx(traffic, rel=0.05)
    assert apart.compute.forward == inside.compute.forward
    assert ours == inside


@pytest.mark.parametrize("settings", [{"fp8_format": "e4m3"}, {"model": "mixtral-8x7b"}])
def test_products_of_8_bits_and_grouped_ones_add_to_no_sum(settings):
    model = settings.get("model", "llama3-8b")
    rest = {name: value for name, value in settings.items() if name != "model"}

    def more(**asked):
        layout = planned(model, 8, mbs=1, **rest | asked)
        ours, apart = (
            predict(layout, H100, Software(accumulates_apart=habit)).step_time
            for habit in ("grouped", "never")
        )
        return ours - apart

    one, three = more(gbs=16), more(gbs=32)
    assert three == pytest.approx(3 * one) and one > 0
    weights = 32 * (3 * 4096 * 14336 * 8 if model != "llama3-8b" else 6.98e9 / 32)
    assert one == pytest.approx(10 * weights / (3350e9 * 0.85), rel=0.05)
    assert more(gbs=8) == more(gbs=32, zero="optim_grads") == 0.0


def test_no_layer_waits_for_the_host_in_one_graph():
    layout = planned("qwen3-30b-a3b", 8, mbs=1, gbs=8, ep=8)
    kind = LayerKind(experts=True)
    graphed = LayerTimes(layout, H100, Software(whole_graph=True, loops_experts=True))
    issued = LayerTimes(layout, H100, Software(loops_experts=True))
    assert graphed.host(kind) == 0.0 < issued.host(kind)
    dense = planned(
        "llama3-8b", 1, mbs=1, gbs=8, reset_attention_mask=False, cuda_graph_impl="local"
    )
    assert LayerTimes(dense, H100, Software()).host(LayerKind()) == 0.0
    assert graphed.layer(kind, ()).total.forward < issued.layer(kind, ()).total.forward


def test_the_host_launches_what_is_no_graph_and_what_the_dispatcher_needs():
    layout = planned("qwen3-30b-a3b", 8, mbs=1, gbs=8, ep=8)
    kind = LayerKind(experts=True)

    def launched(**habits):
        return forward_operations(layout, kind, Software(loops_experts=True, **habits))

    fewer = [launched(dispatcher=each) for each in ("alltoall", "deepep", "hybridep")]
    assert fewer == sorted(fewer, reverse=True) and len({*fewer}) == 3
    modules = ["attn", "moe_router", "moe_preprocess"]
    more = [launched(graphed=frozenset(modules[:n])) for n in range(4)]
    assert more == sorted(more, reverse=True) and len({*more}) == 4
    experts = 4 * 128 // 8  # which are no graph, as the exchange between them is not
    assert more[-1] > experts + 1


@pytest.mark.parametrize(("again", "backward"), [((), 2), (None, 3)])
def test_a_host_that_waits_for_every_kernel_adds_its_time(again, backward):
    layout = planned("llama3-8b", 1, mbs=1, gbs=8)
    kind = LayerKind()
    beside, blocking = (
        LayerTimes(layout, H100, Software(blocks_launches=blocks)) for blocks in (False, True)
    )
    host, hidden = beside.host(kind), beside.layer(kind, again).total
    longer = blocking.layer(kind, again).total
    assert 0 < host < hidden.forward  # which hides it
    assert longer.forward - hidden.forward == pytest.approx(host)
    assert longer.dx + longer.dw - hidden.dx - hidden.dw == pytest.approx(backward * host)


def test_owners_that_broadcast_pay_a_chain_through_all_ranks_for_each_message():
    cluster = preset("A100-80", 1024)
    group = span(cluster, 1024, 1)
    one, many = (broadcasts(cluster, group, 1e9, messages) for messages in (1, 291))
    assert many - one == pytest.approx(290 * 1024 * 14e-6)
    assert one - 1024 * 14e-6 == pytest.approx(1e9 / (8 * cluster.network_link.rate))
    node = span(cluster, 8, 1)
    one, many = (broadcasts(cluster, node, 1e9, messages) for messages in (1, 8))
    assert many - one == pytest.approx(7 * 8 * 4e-6)
    assert broadcasts(cluster, span(cluster, 1, 1), 1e9, 291) == 0


def test_broadcasting_whole_parameters_grows_with_the_ranks_that_shard():
    def communication(world, *, broadcasts_updates, **settings):
        layout = planned("llama3-8b", world, mbs=1, gbs=world, zero="optim", **settings)
        habits = Software(broadcasts_updates=broadcasts_updates)
        found = predict(layout, preset("A100-80", world), habits)
        return next(part.seconds for part in found.parts if part.name == "DP communication")

    def more(world, **settings):
        with_, without = (
            communication(world, broadcasts_updates=b, **settings) for b in (True, False)
        )
        return with_ - without

    off = {"overlap_param_gather": False}
    assert 0 < more(64, **off) < more(1024, **off)
    few = {"num_distributed_optimizer_instances": 128, **off}
    assert more(1024, **few) < 0.1 * more(1024, **off)


def test_eager_kernels_cost_most_where_one_would_do():
    layout = planned("llama3-8b", 8, mbs=1, gbs=8)
    fused, eager = (
        LayerTimes(layout, H100, Software(fused=fused)).operations(LayerKind())
        for fused in (True, False)
    )
    norm, act = (
        eager[name].compute.forward / fused[name].compute.forward
        for name in ("mlp_norm", "mlp_act")
    )
    assert norm > 2 > act > 1


def test_gathered_logits_are_sent_and_every_rank_computes_the_whole_loss():
    layout = planned("llama3-8b", 8, mbs=1, gbs=2, tp=4, sp=True)
    shared, whole = (
        LayerTimes(layout, H100, Software(whole_logits=habit)).head() for habit in (False, True)
    )
    logits = layout.config.training.seq_length * layout.config.model.padded_vocab_size
    sent = gather(H100, span(H100, 4, 1), 2 * logits)
    assert whole.tp.forward - shared.tp.forward == pytest.approx(sent)
    rate = 3350e9 * 0.85
    more = (24 + 10) * logits * 3 / 4 / rate + 4 * logits / rate  # and copied to be joined
    assert whole.compute.total - shared.compute.total == pytest.approx(more, rel=0.01)
    alone = planned("llama3-8b", 8, mbs=1, gbs=8)
    times = [LayerTimes(alone, H100, Software(whole_logits=habit)).head() for habit in (0, 1)]
    assert times[0] == times[1]


def test_a_whole_embedding_is_not_summed_but_its_gradient_is_gathered():
    layout = planned("llama3-8b", 8, mbs=1, gbs=2, tp=4, sp=True)
    split, whole = (
        LayerTimes(layout, H100, Software(whole_embedding=habit)).embedding().tp
        for habit in (False, True)
    )
    assert (whole.forward, whole.dx) == (0.0, split.forward) and split.dx == 0.0 < split.forward
    apart = planned("llama3-8b", 8, mbs=1, gbs=2, tp=4)
    assert LayerTimes(apart, H100, Software(whole_embedding=True)).embedding().tp.total == 0.0


def test_projections_with_a_plan_of_their_own_gather_and_reduce_each():
    layout = planned("llama3-8b", 8, mbs=1, gbs=2, tp=4, sp=True)
    eager = {"fused": False, "overlaps_backward_tp": False}
    once, each, joined = (
        LayerTimes(layout, H100, Software(**habits)).layer(LayerKind(), ()).tp
        for habits in (
            eager,
            eager | {"gathers_each": True},
            {"gathers_each": True, "overlaps_backward_tp": False},
        )
    )
    hidden = gather(H100, span(H100, 4, 1), 2 * 4096 * 4096)
    assert each.forward - once.forward == pytest.approx(3 * hidden)  # of q, k, v; of gate and up
    assert each.dx - once.dx == pytest.approx(3 * hidden)
    assert joined.forward == once.forward and joined.dx == each.dx


def test_gradients_reduced_with_the_last_backward_only_cost_as_much_at_any_count():
    def communication(microbatches, *, reduces_last):
        settings = {"zero": "optim_grads_params", "mbs": 1, "gbs": 64 * microbatches}
        layout = planned("llama3-8b", 64, seq=512, **settings)
        found = predict(layout, H100, Software(reduces_last=reduces_last, gradient_bytes=4.0))
        return next(part.seconds for part in found.parts if part.name == "DP communication")

    always, last = ([communication(n, reduces_last=r) for n in (1, 4)] for r in (False, True))
    assert last[0] == always[0]
    gathered = (always[1] - last[1]) / 3  # what three of four reductions took
    assert gathered > 0.5 * 4 * 8.03e9 / (8 * 40e9)
    assert last[1] < 0.6 * always[1]


def test_ends_in_one_block_are_gathered_before_and_reduced_after_all_else():
    def costs(**settings):
        layout = planned("llama3-8b", 64, mbs=1, zero="optim_grads_params", **settings)
        return [predict(layout, H100, Software(waits_for_ends=habit)).costs for habit in (0, 1)]

    beside, waited = costs(gbs=64)
    ends = 2 * 128256 * 4096
    once = gather(H100, span(H100, 64, 1), 2 * ends)
    slowed = H100.gpu.overlap_slowdown * once  # what it costs the work beside which it is hidden
    assert waited.f[0] - beside.f[0] == pytest.approx(once - slowed, rel=0.01)
    assert waited.b[0] > beside.b[0]
    inner, outer = costs(gbs=64, pp=2, sp=False)
    assert outer.f[0] > inner.f[0]  # the first stage has the embedding
    last = [(each.f[-1], each.b[-1]) for each in costs(pp=2)]
    assert last[0] == last[1]


def test_pytorch_s_list_of_kernels_begins_with_the_best_on_blackwell_only():
    for name, best in (("H100", False), ("A100-80", True), ("B200", True), ("GB300", True)):
        gpu = Software(attention="listed").on(preset(name)).gpu
        reached = preset(name).gpu.attention_forward * (1 if best else preset(name).gpu.flash2)
        assert gpu.attention_forward == reached


def test_norms_of_copies_in_fp32_take_their_traffic():
    layout = planned("llama3-8b", 8, mbs=1, gbs=8)
    plain, cast = (
        LayerTimes(layout, H100, Software(casts_norms=habit)).operations(LayerKind())["mlp_norm"]
        for habit in (False, True)
    )
    rate, elements = 3350e9 * 0.85, 4096 * 4096
    # read in bf16, written and read in fp32; the gradient, too, beside the copy
    assert cast.compute.forward - plain.compute.forward == pytest.approx(8 * elements / rate, 0.1)
    assert cast.compute.dx - plain.compute.dx == pytest.approx(10 * elements / rate, 0.1)


def test_a_bucket_s_last_sum_is_exposed_and_every_gradient_copied():
    layout = planned("llama3-8b", 64, mbs=1, zero="optim", seq=8192)

    def communication(**habits):
        found = predict(layout, H100, Software(gradient_bytes=2.0, **habits))
        return next(part.seconds for part in found.parts if part.name == "DP communication")

    by_layer, few, one = (communication(bucket=size) for size in (None, 1 << 30, 1 << 34))
    assert by_layer < few < one
    off = planned("llama3-8b", 64, mbs=1, zero="optim", overlap_grad_reduce=False)
    alone, copied = (
        predict(off, H100, Software(gradient_bytes=2.0, bucket=size)).step_time
        for size in (None, 1 << 29)
    )
    assert copied - alone == pytest.approx(12 * 8.03e9 / (3350e9 * 0.85), rel=0.02)
    whole = planned("llama3-8b", 64, mbs=1, zero="no_shard")
    times = {predict(whole, H100, Software(bucket=size)).step_time for size in (None, 1 << 29)}
    assert len(times) == 1
