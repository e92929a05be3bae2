"""What MindSpeed-LLM has besides Megatron-LM: read, or refused by name."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.layer_pattern import layers_of
from fivefold.config.megatron_job.arguments import read_job
from fivefold.config.megatron_job.settings import translate
from fivefold.config.sources import read_config
from fivefold.config.translation import Translation
from fivefold.errors import ConfigError

JOB = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 "
    "--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 10 --lr 1e-3 --vocab-size 1000 --mock-data --bf16 "
    "--swiglu --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--attention-dropout 0 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --ffn-hidden-size 96 --moe-ffn-hidden-size 32 "
SPEC = "--spec mindspeed_llm.tasks.models.spec."


def of(more: str) -> Translation:
    return translate(read_job(JOB + more))


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (f"{EXPERTS}--moe-token-dispatcher-type alltoall_seq", {"num_experts": 4}),
        (f"{EXPERTS}--n-shared-experts 2", {"moe_shared_expert_intermediate_size": 64}),
        (
            f"{EXPERTS}--moe-router-load-balancing-type softmax_topk --norm-topk-prob",
            {"moe_router_load_balancing_type": ("none",), "moe_router_pre_softmax": False},
        ),
        (
            f"{EXPERTS}--moe-router-load-balancing-type softmax_topk",
            {"moe_router_load_balancing_type": ("none",), "moe_router_pre_softmax": True},
        ),
        (
            f"{EXPERTS}--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 "
            "--norm-topk-prob --moe-router-pre-softmax",
            {"moe_router_pre_softmax": False},
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo ulysses_cp_algo",
            {"cp_comm_type": ("a2a",)},
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo "
            "--ulysses-degree-in-cp 2",
            {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 4 --low-freq-factor 2 "
            "--original-max-position-embeddings 64",
            {
                "use_rope_scaling": True,
                "rope_scaling_factor": 4.0,
                "rope_low_freq_factor": 2.0,
                "rope_original_max_position_embeddings": 64,
            },
        ),
        (
            "--rope-scaling-type yarn --rope-scaling-factor 4 "
            "--rope-scaling-original-max-position-embeddings 32",
            {
                "rope_type": "yarn",
                "rotary_scaling_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        (
            "--pipeline-model-parallel-size 4 --noop-layers 0,7",
            {"num_layers": 6, "pipeline_model_parallel_layout": "Et|tt|tt|tL"},
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--noop-layers 7",
            {"num_layers": 7, "pipeline_model_parallel_layout": "Ett|tt|tt|tL"},
        ),
        ("--noop-layers 6,7", {"num_layers": 6}),
        (
            "--pipeline-model-parallel-size 2 --num-layer-list 5,3",
            {"pipeline_model_parallel_layout": "Ettttt|tttL"},
        ),
        (
            "--lora-r 4 --lora-alpha 8 --lora-target-modules linear_proj linear_fc2",
            {"lora_rank": 4, "lora_alpha": 8.0, "lora_target_modules": ("o_proj", "down_proj")},
        ),
        (f"{SPEC}qwen3_spec layer_spec --qk-layernorm", {"qk_layernorm": True}),
        ("--add-rmsnorm-offset --normalization RMSNorm", {"apply_layernorm_1p": True}),
        ("--use-fused-swiglu --mla-mm-split", {"num_layers": 8}),
    ],
)
def test_its_own_flags_are_settings_here(more: str, values: dict[str, Any]) -> None:
    found = of(more)
    assert {name: found.values[name] for name in values} == values
    assert not [line for line in found.lost if "no argument of" in line or line.startswith("spec")]
    check(read_config(**found.values), 8)


@pytest.mark.parametrize(
    ("more", "sparse"),
    [
        ("--first-k-dense-replace 2", [False] * 2 + [True] * 6),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", [False, False] + [True, False] * 3),
        ("--first-k-dense-replace -1 --moe-layer-freq -1", [True] * 8),
        ("--first-k-dense-replace 2 --noop-layers 0", [False] + [True] * 6),
    ],
)
def test_layers_with_experts_are_those_there(more: str, sparse: list[bool]) -> None:
    model = read_config(**of(f"{EXPERTS}{more}").values).model
    assert model.num_layers == len(sparse)
    assert [*layers_of("moe_layer_freq", model.moe_layer_freq, len(sparse))] == sparse


def test_conversations_and_tokenizers_are_read() -> None:
    found = of("--stage sft --is-instruction-dataset --prompt-type qwen --tokenizer-type "
               "PretrainedFromHF --tokenizer-name-or-path models/a")  # fmt: skip
    assert found.values["sft"] and found.values["tokenizer_model"] == "models/a/tokenizer.json"
    assert any("prompt_type = qwen" in line for line in found.lost)
    assert "eod_mask_loss" not in found.values  # of which conversations take none


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--post-norm --output-logit-softcapping 30.0", "softcapping 30.0: no(.|\n)*post_norm: no"),
        (f"{SPEC}gemma2_spec layer_spec", "which layers gemma2_spec makes is not known"),
        ("--rope-scaling-type longrope", "rope_scaling_type = longrope"),
        ("--stage dpo", "stage = dpo"),
        ("--lora-r four", "lora_r cannot be 'four': it is a number"),
        ("--context-parallel-size 2 --context-parallel-algo ring", "cannot be ring\n *works: hyb"),
        ("--lora-r 4 --lora-target-modules linear_x", "adapters of linear_x"),
    ],
)
def test_what_no_model_here_has_is_refused_by_name(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of(more)


def test_words_that_belong_to_nothing_are_named_and_change_no_value() -> None:
    """As a variable in a template that is not quoted: "your path"."""
    found = of("--first-k-dense-replace 1 --load your path of weights --save there " + EXPERTS)
    assert any("no argument: path of weights" in line for line in found.lost)


def test_a_script_without_variables_that_trains_nothing_is_refused_by_name() -> None:
    lines = (
        "#!/bin/bash\npython preprocess_data.py --seq-length 128 --vocab-size 100 \\\n  --bf16 \\"
    )
    with pytest.raises(ConfigError, match="the job runs preprocess_data"):
        read_job(lines)
