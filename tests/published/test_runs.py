"""Rows of published runs, as people write them."""

from types import MappingProxyType

import pytest

from fivefold.description.shape import count_parameters
from fivefold.errors import DataError
from fivefold.published.frameworks.registry import FRAMEWORKS, frameworks_of
from fivefold.published.row import (
    COLUMNS,
    OPTIONAL,
    PublishedRow,
    cluster_of,
    model_of,
    read_rows,
)
from fivefold.published.runs import (
    is_graphed,
    measured_bytes,
    measured_seconds,
    row_layouts,
    software_of,
)
from fivefold.published.score import prepare, score

GIVEN = {
    "src": "someone",
    "gpu": "H100",
    "ngpu": "64",
    "model": "LLAMA3.1_405B",
    "seq": "8192",
    "gbs": "256",
    "mbs": "1",
    "tp": "8",
    "pp": "8",
    "vpp": "1",
    "zero": "1",
    "recomp": "full",
    "prec": "bf16",
    "step_s": "100",
}


def row(**cells):
    return PublishedRow(2, MappingProxyType(dict.fromkeys(COLUMNS, "") | GIVEN | cells))


def software(one):
    """The software of a row that can be of one framework only."""
    (framework,) = frameworks_of(one)
    return software_of(one, framework)


def only_layout(**cells):
    (choice,) = row_layouts(row(**cells))
    assert choice.complete
    return choice.layout


@pytest.mark.parametrize(
    "name, billions",
    [
        ("LLAMA3_70B", 70.6),
        ("Llama3.1-8B", 8.03),
        ("LLAMA3.1_405B", 405.9),
        ("DeepSeekV3 (w/o MTP)", 671),
        ("Qwen3-235B-A22B", 235),
        ("Qwen3_30B_a3B (tokendrop)", 30.5),
        ("GPT OSS 120B", 116.8),
        ("LLAMA2-13B", 13.0),
    ],
)
def test_models_are_known_by_the_names_that_people_write(name, billions):
    model = model_of(row(model=name))
    total = count_parameters(model).total - count_parameters(model).mtp
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_shape_is_completed_so_that_it_has_the_parameters_of_its_name():
    shape = {"h": "2048", "ffn": "8192", "heads": "32", "kv": "32", "vocab": "131072"}
    tied = model_of(row(model="1.34B", L="16", **shape))
    assert not tied.untie_embeddings_and_output_weights
    assert count_parameters(tied).total / 1e9 == pytest.approx(1.34, rel=0.01)
    gpt = model_of(row(model="GPT-1.3B", L="16", **shape))
    assert not gpt.gated_linear_unit and gpt.attention_dropout == 0
    assert model_of(row(model="GPT-1.3B", L="16", **shape), drops_scores=True).attention_dropout
    wide = {"h": "4096", "heads": "32", "kv": "8", "vocab": "131072"}
    apart = model_of(row(model="GPT-7B", L="32", **wide))
    assert apart.untie_embeddings_and_output_weights
    assert count_parameters(apart).total / 1e9 == pytest.approx(6.7, rel=0.01)


def test_a_model_with_fewer_layers_keeps_one_without_experts():
    model = model_of(row(model="DeepSeek-V3 (L=4)", L="4", h="7168"))
    assert [model.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    with pytest.raises(DataError, match="neither a shape nor a known model"):
        model_of(row(model="Secret-340B"))


def test_cells_give_their_first_number():
    dirty = row(tflops="1933 (1858)", vpp="n/a", tp="1 (2)", zero="FSDP64 (0)")
    assert dirty.number("tflops") == 1933
    assert dirty.whole("vpp") is None
    assert dirty.whole("tp") == 1


@pytest.mark.parametrize("column", [name for name in (*COLUMNS, *OPTIONAL) if name != "vpp"])
def test_what_is_not_published_is_an_empty_cell(column):
    """In `vpp` it means that stages are not interleaved, which says more."""
    whole = {"zero": "1", "sp": "1", "dp": "1", "framework": "nemo", "release": "24.07"}
    told = [row(**whole | {column: cell}) for cell in ("", "n/a", " N/A ")]
    assert len({each.text(column) for each in told}) == 1
    if column in ("gpu", "model", "src"):
        return
    found = []
    for each in told:
        try:
            found.append([(c.layout.config, c.framework) for c in row_layouts(each)])
        except DataError as error:
            found.append(str(error))
    assert found[0] == found[1] == found[2]


def test_a_setting_that_is_on_or_off_may_have_an_alternative():
    for cell, on in (("1 (0)", True), ("1.0", True), ("0 (1)", False), ("0", False)):
        assert only_layout(sp=cell).config.parallel.sequence_parallel == on


def test_a_shape_that_is_not_its_preset_s_is_another_model():
    shape = {"model": "Llama3-8B", "L": "32", "h": "4096", "heads": "32", "kv": "8"}
    assert model_of(row(**shape, ffn="14336")) == model_of(row(model="Llama3-8B"))
    assert model_of(row(**shape, ffn="11008")).ffn_size == 11008
    assert model_of(row(**shape | {"heads": "64"})).num_attention_heads == 64


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"model": "ours", "L": "4", "h": "64", "heads": "4", "E": "8"}, "no preset has this name"),
        ({"model": "Mixtral-8x7B", "E": "16"}, "E 16 is not 8"),
        ({"model": "Mixtral-8x7B", "topk": "1"}, "topk 1 is not 2"),
        ({"model": "DeepSeek-V3", "L": "61", "h": "4096", "heads": "64"}, "h 4096 is not 7168"),
        ({"model": "Llama3-8B", "E": "8"}, "E 8 is not 1"),
    ],
)
def test_a_model_with_experts_is_never_taken_to_be_dense(cells, why):
    with pytest.raises(DataError, match=why):
        model_of(row(**cells))
    model = {"model": "Mixtral-8x7B", "E": "8", "topk": "2", "ffn": "14336"}
    assert model_of(row(**model)).num_experts == 8


def test_what_is_only_named_after_a_family_is_not_of_it():
    shape = {"L": "4", "h": "64", "heads": "4"}
    assert model_of(row(model="Llama-1B (optimised)", **shape)).gated_linear_unit
    for name in ("OPT-1B", "MPT 1b", "bloomz-1b", "nanoGPT"):
        assert not model_of(row(model=name, **shape)).gated_linear_unit


def test_settings_follow_from_the_columns():
    layout = only_layout(ngpu="512", gbs="512", zero="FSDP64", prec="FP8-CS (FP8-MX)")
    config = layout.config
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert (config.training.fp8_format, config.training.fp8_recipe) == ("hybrid", "tensorwise")
    assert config.memory.recompute_granularity == "full"
    assert (layout.grid.tp, layout.grid.pp, layout.grid.dp) == (8, 8, 8)
    # 126 layers over 8 ranks are balanced.
    assert sorted({len(stage.layers) for stage in layout.split.stages}) == [15, 16]
    assert only_layout(prec="NVFP4").config.training.fp4_format == "e2m1"


@pytest.mark.slow
def test_what_is_not_said_becomes_several_configurations():
    choices = row_layouts(row(mbs="", vpp="", recomp=""))
    assert not any(choice.complete for choice in choices)
    training = {choice.layout.config.training.micro_batch_size for choice in choices}
    memory = {choice.layout.config.memory.recompute_granularity for choice in choices}
    assert training == {1, 2, 4, 8}
    assert memory == {None, "selective", "full"}
    assert {choice.layout.split.num_virtual for choice in choices} == {1, 2, 4, 8, 16}


def test_degrees_that_do_not_make_up_the_gpus_are_refused():
    with pytest.raises(DataError, match="= 128, not 64"):
        row_layouts(row(dp="2"))


def test_old_rows_hold_scores_and_hide_nothing():
    old = row(gpu="A100-80", framework="megatron", release="2021", zero="0")
    assert software(old).attention == "scores"
    assert not software(old).overlaps_backward_tp
    assert software(row()).attention != "scores"
    assert not software(row(note="eager")).fused


def test_times_are_comparable_whatever_was_reported():
    layout = only_layout()
    tokens = 256 * 8192
    assert measured_seconds(row(), layout) == 100
    rate = row(step_s="", tps_gpu=str(tokens / 64 / 100))
    assert measured_seconds(rate, layout) == pytest.approx(100)
    half = measured_seconds(row(step_s="", tflops="400"), layout)
    whole = measured_seconds(row(step_s="", tflops="400", src="torchtitan"), layout)
    hardware = measured_seconds(row(step_s="", tflops="400", flops_conv="HFU96"), layout)
    assert half is not None and whole is not None and hardware is not None
    assert half < whole
    mfu = measured_seconds(row(step_s="", mfu=str(400e14 / 989e12)), layout)
    assert mfu == pytest.approx(half)
    assert measured_seconds(row(step_s=""), layout) is None


def test_memory_has_units():
    assert measured_bytes(row(mem="2", mem_unit="GiB max_allocated")) == 2 * 2**30
    assert measured_bytes(row(mem="2", mem_unit="bytes max_allocated")) == 2
    assert measured_bytes(row()) is None


def test_clusters_are_of_the_size_of_the_run():
    assert cluster_of(row(gpu="H100-96/500W/2.4TBs")).num_gpus == 64
    assert cluster_of(row(gpu="A100-SXM4-40GB")).gpu.name == "A100-40"
    assert cluster_of(row(gpu="NVIDIA H200")).gpu.name == "H200"
    assert cluster_of(row(gpu="h100 sxm5 80gb")).gpu.name == "H100"


def test_files_without_the_columns_are_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("src,gpu\nme,H100\n")
    with pytest.raises(DataError, match="no column"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


def test_deepspeed_hides_nothing_of_zero_1():
    for told in ({"note": "DeepSpeed"}, {"model": "Pythia-12B"}, {"src": "NeoX 20B"}):
        assert software(row(**told)).reduces_whole
    cells = {"framework": "megatron-deepspeed", "release": "2022", "gpu": "A100-80", "ngpu": "128"}
    one = row(**cells)
    assert software(one).reduces_whole and software(one).accumulates_apart == "always"
    assert not software(row(**cells, zero="3")).reduces_whole
    layout = only_layout(**cells)
    assert not layout.config.parallel.overlap_grad_reduce
    assert not layout.config.parallel.overlap_param_gather


def test_a_framework_is_found_by_its_own_names_and_release():
    def entry(**cells):
        (found,) = frameworks_of(row(**cells))
        return found.name, found.since

    assert entry(src="NeMo 24.07") == entry(framework="nemo", release="24.07") == ("nemo", ())
    assert entry(src="NeMo 25.02 on DGX") == ("nemo", (2025,))
    assert entry(framework="megatron", release="core_r0.12") == ("megatron", (2023, 11))
    assert entry(framework="megatron", release="2022-05") == ("megatron", (2022,))
    assert entry(note="PyTorch FSDP, HSDP")[0] == "fsdp"
    assert entry(src="NeMo AutoModel")[0] == "automodel"
    # What is told counts for more than what is named.
    assert entry(src="nanotron", framework="torchtitan")[0] == "torchtitan"
    for entries in FRAMEWORKS:
        assert entries[0].since == () and entries[0].mark
        assert [each.since for each in entries] == sorted(each.since for each in entries)
        assert len({each.name for each in entries}) == 1


@pytest.mark.parametrize("entries", FRAMEWORKS, ids=lambda entries: entries[0].name)
def test_a_release_is_the_same_however_it_is_dated(entries):
    """And the entry is the last that had begun by then."""

    def found(release):
        (entry,) = frameworks_of(row(framework=entries[0].name, release=release))
        return entry

    months = [(2021, 5), (2026, 11)]
    for entry in entries[1:]:
        year, month = *entry.since, *(1,) * (2 - len(entry.since))
        months += [(year, month), (year - (month == 1), (month - 2) % 12 + 1)]
    for year, month in months:
        short = year - 2000
        ways = [f"{year}-{month:02}", f"{year}.{month}", f"{short}.{month:02}", f"v{short}.{month}"]
        latest = [entry for entry in entries if entry.since <= (year, month)][-1]
        assert {found(way) for way in (*ways, f"{year}-{month:02}-28")} == {latest}
    if len(entries) > 1 and entries[0].name != "megatron":
        with pytest.raises(DataError, match=r"'0\.14\.1' of .* has no date"):
            found("0.14.1")


def test_megatron_core_is_dated_by_its_number():
    for release in ("core_r0.4", "core_v0.4.0", "v0.12.1", "0.12", "core 0.12"):
        (entry,) = frameworks_of(row(framework="megatron", release=release))
        assert entry.since == (2023, 11), release


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("Megatron-LM", "megatron"),
        ("Megatron-Bridge", "bridge"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("GPT-NeoX", "megatron-deepspeed"),
        ("NVIDIA NeMo", "nemo"),
        ("PyTorch FSDP2", "fsdp"),
        *((entries[0].name, entries[0].name) for entries in FRAMEWORKS),
    ],
)
def test_a_framework_is_told_by_its_name_as_people_write_it(told, name):
    (entry,) = frameworks_of(row(framework=told))
    assert entry.name == name


def test_fp16_on_an_a100_may_be_several_frameworks_and_the_interval_says_so():
    cells = {"gpu": "A100-80", "prec": "fp16", "model": "GPT3-175B", "seq": "2048"}
    unknown = row(**cells)
    assert len(frameworks_of(unknown)) > 1
    (case,), _ = prepare([unknown])
    (told,), _ = prepare([row(**cells, framework="megatron", release="2024")])
    doubt, known = (score(each).prediction for each in (case, told))
    assert doubt.high / doubt.low > 1.02 * known.high / known.low
    assert len({choice.framework.name for choice in case.choices}) > 1


def test_columns_count_for_more_than_habits():
    plain, told = row(), row(attention="flash1", grads="bf16", graphs="1", fused_loss="1")
    assert software(told).attention == "flash1" and software(told).whole_graph
    assert software(told).gradient_bytes == 2 and software(plain).gradient_bytes is None
    (choice,) = row_layouts(row(fused_loss="1", overlap="0"))
    assert choice.layout.config.memory.cross_entropy_loss_fusion
    assert not choice.layout.config.parallel.overlap_grad_reduce
    for wrong in ({"attention": "fast"}, {"grads": "fp8"}, {"dispatcher": "nccl"}):
        with pytest.raises(DataError, match="must be one of"):
            row_layouts(row(**wrong)), software(row(**wrong))


def test_shards_of_some_ranks_are_repeated_in_the_others():
    sixteen = {"tp": "1", "pp": "1", "ngpu": "128", "model": "Llama3-8B", "gbs": "128"}
    for zero, strategy in (
        *(("1 8x16", "optim"), ("2 8x16", "optim_grads")),
        *(
            (name, "optim_grads_params")
            for name in ("3 8x16", "FSDP 8x16", "HSDP 8x16", "HSDP8x16")
        ),
    ):
        layout = only_layout(zero=zero, framework="megatron", **sixteen)
        assert (layout.grid.dp_shard, layout.grid.dp_replicate) == (8, 16)
        assert layout.config.parallel.data_parallel_sharding_strategy == strategy


def test_a_node_may_have_fewer_gpus_than_usual():
    assert cluster_of(row(gpus_per_node="4")).gpus_per_node == 4


def test_a_network_that_is_told_is_that_of_a_node():
    told = PublishedRow(2, MappingProxyType({**row().cells, "network": "50"}))
    usual = cluster_of(row())
    assert cluster_of(told).network_link.bandwidth == pytest.approx(50e9 / 8)
    assert cluster_of(told).gpu == usual.gpu and usual.network_link.bandwidth == 50e9
    for links in ("4x100 Gbit/s", "8x50Gb/s", "1 x 400 Gbps", "2x25 GB/s"):
        assert cluster_of(row(note=f"EFA, {links}")) == cluster_of(told), links
    for memory in ("8x80GB", "8 x 80 GB HBM3", "8x80gb", "2x400 GBit3"):
        assert cluster_of(row(note=memory)) == usual, memory
    assert cluster_of(row(note="hsdp 4x16")) == usual


@pytest.mark.parametrize(
    ("note", "kernel"),
    [
        ("FlashAttention-2", "flash2"),
        ("flash attn", "flash1"),
        ("fa2, 2023", "flash2"),
        ("with cuDNN", "best"),
        ("FlashAttention-3", "best"),
        ("flash attn v2.5", "flash2"),
        ("a flashy name", "scores"),
        ("", "scores"),
    ],
)
def test_a_kernel_that_a_note_tells_is_not_that_of_the_time(note, kernel):
    old = row(gpu="A100-80", zero="0", framework="megatron", release="2021", note=note)
    assert software(old).attention == kernel


def test_experts_in_mxfp8_are_one_graph_since_the_release_that_says_so():
    def graphed(release, **cells):
        moe = {"model": "Qwen3_30B_a3B", "prec": "MXFP8", "ep": "8", "tp": "1", "gpu": "GB200"}
        moe["recomp"] = ""
        one = row(src=f"Megatron-Bridge {release}", **(moe | cells))
        (framework,) = frameworks_of(one)
        return is_graphed(one, framework), row_layouts(one)[0].layout.config.parallel

    before, after = graphed("26.02"), graphed("26.06", pp="4")
    assert not before[0] and after[0]
    assert after[1].overlap_moe_expert_parallel_comm
    assert not before[1].overlap_moe_expert_parallel_comm
    assert not graphed("26.08", prec="bf16")[0]


def test_what_exchanges_tokens_is_told_or_follows_from_nodes():
    def found(**cells):
        moe = {"model": "Qwen3_30B_a3B", "ep": "8", "tp": "1", "pp": "1", "recomp": "none"}
        one = row(**(moe | cells))
        parallel = row_layouts(one)[0].layout.config.parallel
        fused = parallel.moe_token_dispatcher_type == "flex"
        return software(one).dispatcher, fused, parallel.overlap_moe_expert_parallel_comm

    assert found() == ("alltoall", False, False)
    assert found(ep="16", ngpu="16") == ("deepep", True, False)  # nodes have eight GPUs
    assert found(ep="16", ngpu="16", dispatcher="alltoall") == ("alltoall", False, False)
    assert found(note="DeepEP") == ("deepep", True, False)
    assert found(dispatcher="hybridep", ep_overlap="1") == ("hybridep", True, True)
    assert found(note="1F1B overlap", ep_overlap="0")[2] is False


def test_modules_that_are_graphs_are_told():
    assert software(row(graphs="attn moe_router")).graphed == {"attn", "moe_router"}
    assert not software(row(graphs="1")).graphed and not software(row(graphs="0")).graphed
    with pytest.raises(DataError, match=r"graphs must be 0, 1 or some of attn, .*not 'mlp'"):
        software(row(graphs="attn mlp"))


def test_a_dense_models_activation_is_run_again_with_its_mlp():
    for model, module in (("LLAMA3.1_405B", "mlp"), ("Qwen3_235B_a22B", "moe_act")):
        layout = only_layout(model=model, recomp="norm, act", tp="4", pp="2", ngpu="8")
        assert set(layout.config.memory.recompute_modules) == {"layernorm", module}


def test_pytorch_s_attention_is_that_of_its_release():
    def kernel(framework, release):
        return software(row(framework=framework, release=release, pp="1")).attention

    assert kernel("torchtitan", "2024-12") == "flash2"
    assert kernel("torchtitan", "2025-06") == "listed"
    assert kernel("fsdp", "2025-12") == "flash2"
    assert kernel("fsdp", "2026-04") == kernel("kempnerforge", "2026-04") == "best"


def test_a_loss_is_compiled_with_the_model_by_releases_that_do() -> None:
    def fused(release, note=""):
        found = only_layout(framework="torchtitan", release=release, note=note)
        return found.config.memory.cross_entropy_loss_fusion

    assert not fused("2024-12") and not fused("2025-03")
    assert fused("2025-04") and fused("2025-06") and not fused("2025-06", "eager")


def test_what_a_framework_always_runs_again_is_no_choice_of_a_row() -> None:
    def again(**cells):
        return only_layout(**cells, zero="1").config.memory.recomputed_modules

    assert again(framework="internlm", recomp="none") == ("layernorm",)
    assert again(framework="megatron", recomp="none") == ()
    whole = only_layout(framework="internlm", recomp="full", zero="1").config.memory
    assert whole.recompute_granularity == "full"


def test_megatron_s_first_fused_attention_was_the_first_flash_attention() -> None:
    def kernel(release):
        return software(row(framework="megatron", release=release)).attention

    kernels = ["scores", "flash1", "flash2", "best"]
    assert [kernel(each) for each in ("2022-06", "2023-01", "2023-07", "2024-01")] == kernels


def test_nemo_s_own_8_bit_recipe_has_scales_of_earlier_steps() -> None:
    for release in ("24.07", "25.04"):
        cells = {"framework": "nemo", "release": release}
        assert only_layout(**cells, prec="fp8").config.training.fp8_recipe == "delayed"
        assert only_layout(**cells, prec="fp8-mx").config.training.fp8_recipe == "mxfp8"


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (72, 12, [6] * 12),
        (78, 12, [7] * 11 + [1]),
        (106, 12, [8] + [9] * 10 + [8]),
        (70, 8, [8] + [9] * 6 + [8]),
        (77, 6, [13] * 5 + [12]),
    ],
)
def test_deepspeed_fills_one_stage_after_the_other(layers, stages, counts) -> None:
    layout = only_layout(
        **{
            "framework": "megatron-deepspeed",
            "release": "2022",
            "model": "BLOOM",
            "gpu": "A100-80",
        },
        **{"L": f"{layers}", "h": "1024", "ffn": "4096", "heads": "16", "kv": "16"},
        **{"vocab": "51200", "seq": "2048", "pp": f"{stages}", "ngpu": f"{8 * stages}"},
    )
    assert [len(stage.layers) for stage in layout.split.stages] == counts
    assert [n for stage in layout.split.stages for n in stage.layers] == [*range(layers)]
    ends = [(stage.embedding, stage.head) for stage in layout.split.stages]
    assert ends == [(True, False), *[(False, False)] * (stages - 2), (False, True)]


def test_pipelines_wait_for_messages_as_their_trainers_do() -> None:
    def waits(framework: str, release: str) -> str:
        return software(row(framework=framework, release=release)).waits_for_hops

    assert waits("megatron", "2022") == waits("megatron", "2023.1") == "always"
    assert (
        waits("megatron", "2024.1") == waits("nemo", "24.07") == waits("bridge", "26.06") == "plain"
    )
    assert waits("deepspeed", "2022") == "always"
    assert waits("torchtitan", "2025.6") == waits("nanotron", "0.5") == "never"


def test_a_host_that_blocks_is_told_by_a_note() -> None:
    assert software(row(framework="deepspeed", note="blocking launches")).blocks_launches
    assert not software(row(framework="deepspeed")).blocks_launches


@pytest.mark.parametrize("told", ["", "2"])
def test_experts_are_split_as_a_column_tells(told) -> None:
    one = row(
        **{"model": "Qwen3-30B-A3B", "framework": "megatron", "release": "core_r0.12", "etp": told},
        **{"ngpu": "16", "tp": "2", "pp": "1", "ep": "8", "gbs": "16", "gpu": "A100-80"},
    )
    (choice,) = row_layouts(one)
    assert choice.layout.grid.etp == int(told or 1)
    assert choice.layout.grid.ep == 8


def test_some_layers_may_be_run_again() -> None:
    memory = only_layout(recomp="full 3").config.memory
    assert (memory.recompute_method, memory.recompute_num_layers) == ("block", (3,))
    assert only_layout(recomp="full").config.memory.recompute_method == "uniform"
    with pytest.raises(DataError, match="full"):
        row_layouts(row(recomp="full three"))
    with pytest.raises(DataError, match="'1' is none of none, full, selective"):
        row_layouts(row(recomp="1"))
    assert only_layout(recomp="core_attn") == only_layout(recomp="selective")
    assert only_layout(recomp="no") == only_layout(recomp="0") == only_layout(recomp="none")
