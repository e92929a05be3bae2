"""Whole steps of random layouts, against theory: everything equal, on every rank."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.audit.measure import measured
from fivefold.audit.record import RankRecord, expected_record, read_records, write_record
from fivefold.audit.report import audit
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.errors import DataError
from fivefold.layout import Layout
from fivefold.tell.describe import parallelism
from fivefold.train.engine import Engine
from tests.audit.layouts import FAMILIES, microbatches_of, random_layouts
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

FEW, MANY = 1, 50
MEASURED_BY_HOST = ("at model/moe/grouped.py", "at expert/transfer.py")
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ENDS = {"first_last_layers_bf16": True}
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 36,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 44,
    "vocab_size": 230,
    "make_vocab_size_divisible_by": 16,
    "max_position_embeddings": 64,
    "mtp_num_layers": 2,
}


@shared_groups()
def _step(rank: int, world: int, layout: Layout, documents: int, folder: Path) -> None:
    engine = Engine(layout, rank, torch.device("cpu"))
    microbatches = microbatches_of(layout, rank, documents)
    with measured(engine, 1, folder):
        engine.step(microbatches)


def records_of(layout: Layout, documents: int, folder: Path) -> list[RankRecord]:
    run(layout.grid.world_size, _step, layout, documents, folder)
    return read_records(folder)


def check_records(layout: Layout, number: int, folder: Path) -> None:
    """Run a step of a random layout; everything that is measured must be what theory says."""
    _check(layout, _documents(layout, number), folder)


def _check(layout: Layout, documents: int, folder: Path) -> None:
    records = records_of(layout, documents, folder)
    report = audit(parallelism(layout), layout, records, None, None)
    assert report.passed, report.text()
    for record in records:  # equal, where a user's run is allowed 3 %
        expected = expected_record(layout, record)
        assert record.activations == expected.activations, parallelism(layout)
        assert record.waits is not None
        # Besides the end of the step only what experts without a grouped kernel, or their messages,
        # need to know.
        files: Counter[str] = Counter()
        for line, times in record.waits.items():
            files[line.partition(":")[0]] += round(times)
        assert files.pop("at train/step_result.py") == 1, parallelism(layout)
        assert {*files} <= {*MEASURED_BY_HOST}, parallelism(layout)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FEW))
def test_a_step_does_what_theory_says(number: int, tmp_path: Path) -> None:
    layout = next(islice(random_layouts(5), number, None))
    check_records(layout, number, tmp_path)


# (ranks, family, recipe, settings)
EIGHT_BIT: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "latents": (1, "latent", "blockwise", {"seq_length": 160}),
    "sequence parallel": (2, "llama", "blockwise", SEQUENCE | {"seq_length": 160}),
    "exponents": (
        2,
        "llama",
        "mxfp8",
        SEQUENCE | {"seq_length": 80, "tp_comm_overlap": True},
    ),
    "of earlier steps": (
        2,
        "llama",
        "delayed",
        SEQUENCE | {"fp8_amax_history_len": 3, "tp_comm_overlap": True},
    ),
    "plain queries, gathered": (2, "latent", "tensorwise", SEQUENCE | {"q_lora_rank": None}),
    "recomputed in part": (
        2,
        "qwen",
        "rowwise",
        SEQUENCE
        | {
            "mtp_num_layers": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "mlp"),
        },
    ),
    "recomputed, one rank": (
        1,
        "llama",
        "tensorwise",
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    ),
    "layers recomputed in tiles": (
        2,
        "llama",
        "rowwise",
        SEQUENCE
        | {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": (1,),
            "tiled_mlp_num_shards": 3,
        },
    ),
    "exchanged by heads": (
        2,
        "llama",
        "delayed",
        {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
    ),
    "ends in bf16, interleaved, recomputed in part": (
        2,
        "gpt",
        "blockwise",
        ENDS
        | {
            "num_layers_at_end_in_bf16": 2,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "mlp"),
        },
    ),
    "ends in bf16, sequence parallel, deferred": (
        4,
        "latent",
        "delayed",
        SEQUENCE
        | ENDS
        | {
            "mtp_num_layers": 1,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb_h1",
        },
    ),
    "ends in bf16, layers recomputed": (
        1,
        "llama",
        "tensorwise",
        ENDS | {"num_layers_at_start_in_bf16": 0, "recompute_granularity": "full"},
    ),
    "offloaded, ring": (
        2,
        "llama",
        "rowwise",
        {
            "context_parallel_size": 2,
            "fine_grained_activation_offloading": True,
            "offload_modules": ("core_attn", "attn_proj"),
            "min_offloaded_tensor_size": 200,
            "activation_offload_fraction": 0.5,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(
        EIGHT_BIT,
        "latents",
        "sequence parallel",
        "exchanged by heads",
        "ends in bf16, interleaved, recomputed in part",
    ),
)
def test_8_bits_are_kept_and_sent_as_theory_says(name: str, tmp_path: Path) -> None:
    world, family, recipe, settings = EIGHT_BIT[name]
    model = SIZES | FAMILIES[family] | {"hidden_size": 32, "mtp_num_layers": 0}
    model |= {key: settings[key] for key in settings if key in vars(ModelConfig(**SIZES))}
    values = {key: value for key, value in settings.items() if key not in model}
    base = {"global_batch_size": 2, "seq_length": 32, "precision": "bf16", "fp8_format": "e4m3"}
    config = Config(ModelConfig(**model)).with_values(**base | values, fp8_recipe=recipe)
    _check(check(config, world), 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"zero_quantized_weights": True}, marks=pytest.mark.exhaustive),
        {"fp8_format": "e4m3", "fp8_param_gather": True},
    ],
    ids=["whole", "in few bits", "in 8 bits"],
)
def test_what_a_node_keeps_of_weights_is_no_activation(
    more: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "zero_hpz_partition_size": 2,
        **more,
    }
    model = ModelConfig(**SIZES | {"mtp_num_layers": 0})
    config = Config(model).with_values(seq_length=16, global_batch_size=4, **settings)
    _check(check(config, 4), 1, tmp_path)


def _moved(*modules: str, **more: Any) -> dict[str, Any]:
    size = {"offload_modules": modules, "min_offloaded_tensor_size": 1}
    return {"fine_grained_activation_offloading": True, **size, **more}


def _again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


DORA = {"lora_rank": 2, "use_dora": True, "lora_dropout": 0.2}
# (ranks, family, changes of the model, settings); of stages one holds its input beside the copy
OFFLOADED: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "two stages": (2, "llama", {}, _moved("attn_norm")),
    "two stages, too small": (
        2,
        "llama",
        {},
        _moved("attn_norm", min_offloaded_tensor_size=1 << 20),
    ),
    "two stages, norms after": (2, "llama", {"norm_placement": "after"}, _moved("qkv_linear")),
    "two stages, made again of it": (
        2,
        "llama",
        {},
        _moved("attn_norm", "core_attn", "attn_proj", "mlp_norm") | _again("layernorm", "mlp"),
    ),
    "latents": (1, "latent", {}, _moved("qkv_linear", min_offloaded_tensor_size=64 * 11 * 4)),
    "latents made again of": (
        1,
        "latent",
        {"lora_rank": 2, "use_dora": True},
        _moved("qkv_linear", "attn_norm") | _again("mla_up_proj"),
    ),
    "latents, plain queries": (1, "latent", {"q_lora_rank": None}, _moved("qkv_linear")),
    "adapters": (1, "llama", DORA, _moved("qkv_linear", "core_attn", "attn_proj")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(OFFLOADED, "two stages, norms after", "latents made again of"),
)
def test_the_device_keeps_what_is_not_offloaded(name: str, tmp_path: Path) -> None:
    world, family, changes, settings = OFFLOADED[name]
    model = ModelConfig(**SIZES | FAMILIES[family] | {"mtp_num_layers": 0} | changes)
    config = Config(model).with_values(
        precision="fp32",
        seq_length=64,
        global_batch_size=2,
        pipeline_model_parallel_size=world,
        **settings,
    )
    _check(check(config, world), 1, tmp_path)


# (ranks, model, settings)
EMBEDDED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "positions from a later row": (1, {"position_embedding_offset": 2}, {}),
    "positions from a later row, split": (2, {"position_embedding_offset": 2}, SEQUENCE),
    "normed": (2, {"embed_layernorm": True, "norm_elementwise_affine": False}, SEQUENCE),
    "bounded, with biases": (
        2,
        {"clip_qkv": 0.5, "add_bias_linear": False, "mlp_bias": True, "lm_head_bias": True},
        {"pipeline_model_parallel_size": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(EMBEDDED, *[*EMBEDDED][1:]))
def test_embeddings_and_biases_of_one_part_keep_what_theory_says(name: str, tmp_path: Path) -> None:
    world, changes, settings = EMBEDDED[name]
    family = FAMILIES["gpt"] | {"untie_embeddings_and_output_weights": True}
    model = ModelConfig(**SIZES | family | {"mtp_num_layers": 0} | changes)
    config = Config(model).with_values(
        precision="fp32", seq_length=16, global_batch_size=2, **settings
    )
    _check(check(config, world), 1, tmp_path)


# (ranks, family, settings); two further tokens
PREDICTIONS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "with the head": (1, "gpt", {"hidden_dropout": 0.1}),
    "with a head that reads them divided": (2, "sinks", SEQUENCE),
    "with a head that reads them divided, adapters": (1, "sinks", {"lora_rank": 2}),
    "before the head": (
        4,
        "llama",
        SEQUENCE
        | {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ettttmm|L",
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "linear",
        },
    ),
    "before a head that reads them divided, adapters": (
        2,
        "sinks",
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ettttmm|L",
            "lora_rank": 2,
        },
    ),
    "recomputed": (2, "qwen", SEQUENCE | {"recompute_granularity": "full"}),
    "recomputed in part": (
        2,
        "llama",
        {
            "context_parallel_size": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "mlp"),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(PREDICTIONS, *[*PREDICTIONS][::4], [*PREDICTIONS][-1]))
def test_mtp_modules_do_what_theory_says(name: str, tmp_path: Path) -> None:
    world, family, settings = PREDICTIONS[name]
    model = ModelConfig(**SIZES | FAMILIES[family])
    config = Config(model).with_values(
        precision="fp32", seq_length=16, global_batch_size=2, **settings
    )
    _check(check(config, world), 1, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(MANY))
def test_many_steps_do_what_theory_says(number: int, tmp_path: Path) -> None:
    layout = next(islice(random_layouts(50), number, None))
    check_records(layout, number, tmp_path)


def test_what_is_not_as_predicted_is_named(tmp_path: Path) -> None:
    layout = next(layout for layout in random_layouts(1) if layout.grid.tp == 2)
    records = [expected_record(layout, _empty(rank)) for rank in range(layout.grid.world_size)]
    assert audit("", layout, records, None, None).passed
    more = {"tp": records[1].sent["tp"] + 8}
    wrong = [records[0], replace(records[1], sent={**records[1].sent, **more}), *records[2:]]
    report = audit("", layout, wrong, 1.0, None)
    assert not report.passed
    assert report.text().splitlines()[-1] == "not as predicted: sent over tp"
    assert f"+8 on rank 1, wrong on 1 of {len(records)} ranks" in report.text()


def test_activations_may_be_three_percent_off(tmp_path: Path) -> None:
    layout = next(layout for layout in random_layouts(2) if layout.grid.world_size == 1)
    record = expected_record(layout, _empty(0))
    for factor, passes in ((1.029, True), (1.031, False), (0.969, False)):
        sizes = {stage: factor * size for stage, size in record.activations.items()}
        changed = replace(record, activations=sizes)
        assert audit("", layout, [changed], None, None).passed == passes


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(["p2p", "all_gather", "a2a"], "p2p"))
def test_what_documents_keep_at_home_is_told_but_not_judged(kind: str, tmp_path: Path) -> None:
    layout = next(
        layout
        for layout in random_layouts(7)
        if layout.grid.cp > 1
        and layout.grid.world_size <= 4
        and layout.config.parallel.cp_comm_type == (kind,)
        # Gathered latents that nobody sees are not projected either.
        and layout.config.model.multi_latent_attention == (kind == "all_gather")
    )
    records = records_of(layout, 2, tmp_path)
    report = audit("", layout, records, None, None)
    assert report.passed, report.text()
    (sent,) = [finding for finding in report.findings if finding.name == "sent over cp"]
    (products,) = [finding for finding in report.findings if finding.name == "matrix products"]
    assert (products.tolerance is None) == (kind == "all_gather")
    assert products.predicted is not None and products.measured is not None
    assert products.measured <= products.predicted
    assert sent.predicted is not None and sent.measured is not None
    if kind == "a2a":  # heads of all tokens are exchanged, whatever their documents
        assert sent.tolerance == 0 and sent.measured == sent.predicted
        return
    assert sent.tolerance is None and sent.measured < sent.predicted
    assert "reported, not judged" in report.text()
    whole = [replace(record, packed=False, any_packed=False) for record in records]
    assert "sent over cp" in audit("", layout, whole, None, None).text().splitlines()[-1]


@pytest.mark.parametrize(("precision", "copied"), [("bf16", False), ("fp32", True)])
def test_a_gpu_keeps_the_output_of_documents_once(precision: str, copied: bool) -> None:
    """On an H100 it kept one [T, H] a layer less than on a CPU, whose documents are joined."""
    model = ModelConfig(**SIZES | {"mtp_num_layers": 0})
    layout = check(Config(model).with_values(precision=precision, seq_length=16), 1)
    on_cpu = replace(_empty(0), packed=True)
    on_gpu = replace(on_cpu, peak_allocated=1.0)
    kept, there = (expected_record(layout, record).activations[0] for record in (on_cpu, on_gpu))
    output = 16 * ELEMENT_BYTES[layout.config.training.precision] * model.attention_size
    assert kept - there == (0 if copied else SIZES["num_layers"] * output)


def test_a_run_that_was_not_measured_says_how_to_measure_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train with --audit"):
        read_records(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """Also the last one, without which the others could be those of a smaller run."""
    for rank in range(2):
        write_record(tmp_path, replace(_empty(rank), world_size=2))
    for rank in range(2):
        path = (tmp_path / f"rank-{rank}.json").rename(tmp_path / "kept")
        with pytest.raises(DataError, match=f"lacks the record of rank {rank}\n  try: "):
            read_records(tmp_path)
        path.rename(tmp_path / f"rank-{rank}.json")


def test_what_a_record_says_beyond_what_is_known_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, _empty(0))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("{", '{"launched": 3,', 1))
    with pytest.raises(DataError, match=r"rank-0\.json has 'launched', of which this version"):
        read_records(tmp_path)


def test_records_of_several_starts_are_not_one_audit(tmp_path: Path) -> None:
    for rank, step in enumerate((2, 2, 7)):
        write_record(tmp_path, replace(_empty(rank), step=step, world_size=3))
    with pytest.raises(DataError, match="records of steps 2 and 7\n  try: "):
        read_records(tmp_path)


def _documents(layout: Layout, number: int) -> int:
    """A row's: two in every other layout; what context parallelism sends then depends on them."""
    return 1 if layout.grid.cp > 1 else 1 + number % 2


def _empty(rank: int) -> RankRecord:
    return RankRecord(rank, 1, {}, 0.0, 0.0, 0.0, {}, 0.0)
