"""Jobs of LoongForge, whose models stand in files: a checkout of a few lines, made here."""

from pathlib import Path
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.megatron_job.arguments import read_job
from fivefold.config.megatron_job.command import ScriptEnvironment
from fivefold.config.megatron_job.settings import translate
from fivefold.config.sources import read_config
from fivefold.config.translation import Translation
from fivefold.errors import ConfigError

TABLE = """
from pathlib import Path

MODEL_CONFIG_REGISTRY = {
    "small": {"config_path": "configs/models/a", "config_name": "small"},
    "gone": {"config_path": "configs/models/a", "config_name": "gone"},
    # many more
}
raise SystemExit("nothing of it is run")
"""
FIELDS: dict[str, object] = {
    "_target_": "loongforge.models.foundation.Qwen3Config",
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 8,
    "group_query_attention": "true",
    "num_query_groups": 2,
    "vocab_size_in_config_file": 1000,
    "normalization": "RMSNorm",
    "swiglu": "true",
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "add_bias_linear": "false",
    "qk_layernorm": "true",
    "norm_epsilon": "1e-6",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": "true",
    "model_type": "qwen",
    "num_experts": "null",
    "convert_file": "${oc.env:LOONGFORGE_PATH}/configs/convert.yaml",
}
SCRIPT = """
LOONGFORGE_PATH=${LOONGFORGE_PATH:-/nowhere/LoongForge}
ARGS=(MODEL --hf-tokenizer-path $TOKENIZER --tokenizer-type HFTokenizer --mock-data
  --training-phase pretrain --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1
  --global-batch-size 16 --train-iters 10 --lr 1e-3 --bf16 --initial-loss-scale 65536
  --hidden-size 999 --enable-fa-within-mla --use-distributed-optimizer)
torchrun --nproc_per_node 8 $LOONGFORGE_PATH/loongforge/train.py ${ARGS[@]} MORE
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "LoongForge"
    for folder in ("loongforge/utils", "configs/models/a", "configs/models/lora", "examples/a"):
        (root / folder).mkdir(parents=True)
    (root / "loongforge/utils/config_map.py").write_text(TABLE)
    return root


def of(
    root: Path, model: str = "--model-name Small", more: str = "", **fields: object
) -> Translation:
    """A job whose script lies in a checkout, with a model's file of these fields."""
    lines = (f"{name}: {value}" for name, value in {**FIELDS, **fields}.items())
    (root / "configs/models/a/small.yaml").write_text("\n".join(lines))
    text = SCRIPT.replace("MODEL", model).replace("MORE", more)
    return translate(read_job(text, ScriptEnvironment({}, (), root / "examples/a/job.sh")))


@pytest.mark.parametrize(
    "model", ["--model-name small", "--config-file ${LOONGFORGE_PATH}/configs/models/a/small.yaml"]
)
def test_the_file_of_a_model_counts_more_than_its_flags(checkout: Path, model: str) -> None:
    found = of(checkout, model)
    said = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 160, "num_query_groups": 2}
    said |= {"vocab_size": 1000, "qk_layernorm": True, "norm_epsilon": 1e-6, "lr": 1e-3}
    assert {name: found.values[name] for name in said} == said
    assert "num_experts" not in found.values
    lost = " ".join(found.lost)
    assert "tokenizer_model = $TOKENIZER" in lost
    assert not [word for word in ("model-name", "config", "scale", "phase", "fa-") if word in lost]
    check(read_config(**found.values), 8)


def test_a_checkout_is_found_by_its_variable(checkout: Path, tmp_path: Path) -> None:
    of(checkout)
    text = SCRIPT.replace("MODEL", "--model-name small").replace("MORE", "")
    there = ScriptEnvironment({"LOONGFORGE_PATH": str(checkout)}, (), tmp_path / "job.sh")
    assert translate(read_job(text, there)).values["num_layers"] == 8
    with pytest.raises(ConfigError, match=r"--model-name small names a file(.|\n)*LOONGFORGE_PATH"):
        read_job(text, ScriptEnvironment({}, (), tmp_path / "job.sh"))


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (
            "--pipeline-model-parallel-size 2 --custom-pipeline-layers 5,3",
            {"pipeline_model_parallel_layout": "Ettttt|tttL"},
        ),
        (
            "--pipeline-model-parallel-size 2 --custom-pipeline-layers 5,3 "
            "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
            "--recompute-method block --custom-pipeline-recompute-layers 5,3",
            {
                "pipeline_model_parallel_layout": "Ett|t|ttt|ttL",
                "recompute_method": "uniform",
                "recompute_num_layers": (1,),
            },
        ),
        (
            "--pipeline-model-parallel-size 2 --custom-virtual-pipeline-layers 1,2,3,2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            {"pipeline_model_parallel_layout": "Et|tt|ttt|ttL"},
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-granularity full "
            "--custom-pipeline-recompute-layers 3,1",
            {"recompute_method": "block", "recompute_num_layers": (3, 1)},
        ),
        (
            "--context-parallel-size 4 --context-parallel-ulysses-degree 2",
            {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
        ),
        (
            "--context-parallel-size 2 --context-parallel-ulysses-degree 2",
            {"cp_comm_type": ("a2a",)},
        ),
        ("--vocab-size-in-config-file 7", {"vocab_size": 1000}),
        ("+num_layers=6", {"num_layers": 6}),
        (
            "--training-phase sft --chat-template qwen",
            {"sft": True, "reset_attention_mask": True, "reset_position_ids": True},
        ),
    ],
)
def test_its_own_flags_are_settings_here(
    checkout: Path, flags: str, values: dict[str, Any]
) -> None:
    found = of(checkout, more=flags)
    config = read_config(**found.values)
    assert {name: found.values[name] for name in values} == values
    named = [line for line in found.lost if "no argument of Megatron-LM" in line]
    assert not named
    if "sft" not in flags:
        check(config, 8)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (
            {"_target_": "x.MinimaxConfig", "num_experts": 4, "moe_ffn_hidden_size": 32},
            {"qk_layernorm_type": "all_heads", "num_experts": 4},
        ),
        (
            {
                "_target_": "x.Qwen3NextConfig",
                "num_experts": 4,
                "moe_ffn_hidden_size": 32,
                "full_attention_interval": 4,
            },
            {
                "experimental_attention_variant": "gated_delta_net",
                "linear_attention_freq": "4",
                "attention_output_gate": True,
                "apply_layernorm_1p": True,
            },
        ),
        (
            {
                "_target_": "x.DeepseekConfig",
                "multi_latent_attention": "true",
                "num_experts": 4,
                "moe_ffn_hidden_size": 32,
                "moe_layer_freq": '${moe_freq:"[0]*1+[1]*7"}',
                "rotary_scaling_factor": 8,
                "original_max_position_embeddings": 16,
                "beta_fast": 24,
                "kv_lora_rank": 32,
            },
            {
                "moe_layer_freq": "[0]*1+[1]*7",
                "rope_type": "yarn",
                "original_max_position_embeddings": 16,
                "beta_fast": 24.0,
                "kv_lora_rank": 32,
            },
        ),
    ],
)
def test_what_code_does_besides_is_said_here(
    checkout: Path, fields: dict[str, object], values: dict[str, Any]
) -> None:
    found = of(checkout, **fields)
    assert {name: found.values[name] for name in values} == values
    read_config(**found.values)


def test_adapters_of_a_file_are_those_here(checkout: Path) -> None:
    (checkout / "configs/models/lora/lora.yaml").write_text(
        "_target_: x.LoraConfig\ntarget_modules: [linear_proj, linear_fc1]\ndim: 4\nalpha: 8\n"
    )
    found = of(checkout, more="--lora-dim 6", defaults="[{../lora@peft_config: lora}]")
    said = {"lora_rank": 6, "lora_alpha": 8.0}
    said |= {"lora_target_modules": ("o_proj", "gate_proj", "up_proj")}
    assert {name: found.values[name] for name in said} == said
    assert any("linear_fc1" in line for line in found.lost)
    check(read_config(**found.values), 8)


@pytest.mark.parametrize(
    ("model", "more", "fields", "message"),
    [
        ("--model-name smoll", "", {}, r"has no model smoll\n *works: small"),
        ("--model-name gone", "", {}, "gone.yaml, which describes the model, is not there"),
        ("--config-file x.yaml", "", {}, "x.yaml, which describes the model, is not there"),
        ("--model-name small", "", {"_target_": "x.WanConfig"}, "its class is WanConfig"),
        ("--model-name small", "+model.foundation.freeze=True", {}, "no model of language"),
        ("--model-name small", "", {"newest_thing": 3}, "newest_thing = 3 of small.yaml: no model"),
        ("--model-name small", "", {"num_layers": "many"}, "num_layers of small.yaml cannot be"),
        ("--model-name small", "", {"rotary_emb_func": "M"}, "rotary_emb_func = M"),
        (
            "--model-name small",
            "--pipeline-model-parallel-size 2 --custom-pipeline-layers 5,2",
            {},
            r"\[5, 2\] layers: there are 2 stages, and 8 layers",
        ),
        (
            "--model-name small",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--custom-pipeline-layers 4,4 --custom-pipeline-recompute-layers 4,2",
            {},
            "4,2: of which of the stages of a rank",
        ),
        ("--model-name small", "--custom-pipeline-layers 5,x", {}, "numbers with commas between"),
    ],
)
def test_what_no_model_here_has_is_refused_by_name(
    checkout: Path, model: str, more: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of(checkout, model, more, **fields)
