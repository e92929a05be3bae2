"""What is recomputed, discarded, fused or moved changes no gradient."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, STAGES, chosen, config, flags, verify_in_pool


def _full(method: str = "uniform", layers: int = 1) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": (layers,),
    }


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


NATIVE = {"cross_entropy_loss_fusion": True}
MOVED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
    "min_offloaded_tensor_size": 1,
    "activation_offload_fraction": 0.4,
}
LINEAR = NATIVE | {"cross_entropy_fusion_impl": "linear"}
EVERYTHING = _selective("core_attn", "mlp", "layernorm")
ON_HOST = {"optimizer_cpu_offload": True}
VISITING = {"offload_optimizer_states": True}
FEW = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
EIGHT = {**FEW, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "the optimizer on the host, ZeRO-2, tied over stages, half": (
        4,
        "gpt",
        flags(pp=2, stages=STAGES[2, 1], strategy="optim_grads")
        | ON_HOST
        | {"optimizer_offload_fraction": 0.5},
    ),
    "the optimizer on the host but for updates, ZeRO-3, tensor parallel": (
        4,
        "llama",
        flags(tp=2, sequence=True, strategy="optim_grads_params") | VISITING,
    ),
    "weights off the device, tied over stages": (
        4,
        "llama tied",
        flags(pp=2, stages=STAGES[2, 1], strategy="optim_grads_params")
        | ON_HOST
        | {"param_cpu_offload": True},
    ),
    "moments of bf16, ZeRO-1, tensor parallel, half on the host": (
        4,
        "llama tied",
        flags(tp=2, strategy="optim") | FEW | ON_HOST | {"optimizer_offload_fraction": 0.5},
    ),
    "the second moment in bf16, two copies of the embedding": (
        4,
        "gpt",
        flags(pp=2, stages=STAGES[2, 1], strategy="optim_grads_params")
        | FEW
        | {"exp_avg_dtype": "fp32"},
    ),
    "moments of bf16, experts": (
        2,
        "oss",
        flags(strategy="optim_grads") | FEW | {"expert_model_parallel_size": 2},
    ),
    "moments of fp8, ZeRO-3, tensor parallel": (
        4,
        "llama tied",
        flags(tp=2, sequence=True, strategy="optim_grads_params")
        | EIGHT
        | {"ffn_hidden_size": 64, "kv_channels": 16},
    ),
    "moments of fp8, two copies of the embedding": (
        4,
        "gpt",
        flags(pp=2, stages=STAGES[2, 1], strategy="optim") | EIGHT,
    ),
    "the second moment in fp8, experts": (
        2,
        "oss",
        flags(strategy="optim_grads")
        | EIGHT
        | {"exp_avg_dtype": "bf16", "expert_model_parallel_size": 2},
    ),
    "each layer, dropout": (1, "gpt", flags() | _full()),
    "pairs of layers, ZeRO-3": (
        2,
        "llama tied",
        flags(strategy="optim_grads_params") | _full(layers=2),
    ),
    "pairs of layers, ZeRO-2, tensor parallel": (
        4,
        "gpt",
        flags(tp=2, sequence=True, strategy="optim_grads") | _full(layers=2),
    ),
    "the first layer of each stage, ZeRO-1": (
        4,
        "llama",
        flags(pp=2, stages=STAGES[2, 2], strategy="optim") | _full("block"),
    ),
    "numbers of layers by stage": (
        4,
        "llama",
        flags(pp=2, stages=STAGES[2, 2], strategy="optim_grads_params")
        | _full("block")
        | {"recompute_num_layers": (0, 1, 0, 1)},
    ),
    "modules of some layers by stage, deferred weights": (
        8,
        "gpt",
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True)
        | EVERYTHING
        | {
            "recompute_method": "block",
            "recompute_num_layers": (0, 2),
            "tiled_mlp_num_shards": 2,
            "pipeline_schedule": "zb_h1",
            "micro_batch_size": 1,
        },
    ),
    "key/value heads fewer than ranks": (
        4,
        "llama",
        flags(tp=4, sequence=True) | _full() | {"num_query_groups": 1},
    ),
    "discarded norms": (2, "llama", flags(tp=2) | _selective("layernorm")),
    "discarded layer norms": (1, "gpt untied", flags() | _selective("layernorm")),
    "every module, dropout": (2, "gpt", flags(tp=2, sequence=True) | EVERYTHING),
    "every module, ZeRO-3": (2, "llama", flags(strategy="optim_grads_params") | EVERYTHING),
    "every module, deferred weights": (
        4,
        "llama tied",
        flags(pp=4, stages=STAGES[4, 1])
        | EVERYTHING
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1, "global_batch_size": 2},
    ),
    "tiles, ZeRO-3": (
        2,
        "llama",
        flags(strategy="optim_grads_params") | EVERYTHING | {"tiled_mlp_num_shards": 3},
    ),
    "layers and tiles, deferred weights": (
        4,
        "gpt",
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True, strategy="optim")
        | _full(layers=2)
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1, "tiled_mlp_num_shards": 4},
    ),
    "inputs of layers moved, tiles": (
        2,
        "llama",
        flags(pp=2, stages="Et|ttL")
        | _full()
        | MOVED
        | {"offload_modules": (), "offload_tensors": ("layer_input",), "tiled_mlp_num_shards": 2},
    ),
    "outputs of norms moved": (
        2,
        "gpt",
        flags(tp=2, sequence=True)
        | _selective("mlp")
        | MOVED
        | {
            "offload_modules": ("mlp_norm",),
            "offload_tensors": ("pre_mlp_layernorm_output",),
            "tiled_mlp_num_shards": 2,
        },
    ),
    "moved and made again of that, tensor parallel": (
        2,
        "gpt",
        flags(tp=2, sequence=True)
        | MOVED
        | {"offload_modules": ("attn_norm", "core_attn", "mlp_norm")}
        | _selective("layernorm", "mlp"),
    ),
    "moved, ZeRO-3": (2, "gpt", flags(strategy="optim_grads_params") | MOVED),
    "moved and recomputed, tensor parallel, deferred weights": (
        8,
        "llama",
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True, strategy="optim")
        | MOVED
        | _selective("core_attn", "mlp")
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1},
    ),
    "native loss": (1, "llama tied", flags() | NATIVE),
    "native loss, deferred weights": (
        2,
        "gpt",
        flags(pp=2, stages="Et|ttL") | NATIVE | {"pipeline_schedule": "zb_h1"},
    ),
    "native loss, vocabulary part of padding only": (
        4,
        "llama",
        flags(tp=4, sequence=True)
        | NATIVE
        | {"vocab_size": 70, "make_vocab_size_divisible_by": 104, "label_smoothing": 0.0},
    ),
    "linear loss": (1, "gpt", flags() | LINEAR),
    "linear loss, tensor parallel": (2, "llama", flags(tp=2) | LINEAR | {"label_smoothing": 0.0}),
    "linear loss, vocabulary part of padding only": (
        4,
        "llama",
        flags(tp=4, sequence=True)
        | LINEAR
        | {"vocab_size": 70, "make_vocab_size_divisible_by": 104},
    ),
    "linear loss, tied over the pipeline, deferred weights, ZeRO-2": (
        8,
        "llama tied",
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True, strategy="optim_grads")
        | LINEAR
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1},
    ),
    "linear loss, ZeRO-3, one stage": (
        2,
        "gpt",
        flags(strategy="optim_grads_params") | LINEAR | _full(),
    ),
    "pairs of layers, deferred weights, ZeRO-3": (
        4,
        "gpt",
        flags(pp=2, stages="Et|ttL", strategy="optim_grads_params")
        | _full(layers=2)
        | {"pipeline_schedule": "zb_h2", "micro_batch_size": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "weights off the device, tied over stages",
        "every module, deferred weights",
        "the second moment in bf16, two copies of the embedding",
        "moments of fp8, ZeRO-3, tensor parallel",
    ),
)
def test_memory_techniques_are_exact(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(MODELS[model], world, **settings))
    assert report.passed, report.text()


BF16_CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "native loss": (2, "llama tied", flags(tp=2, sequence=True) | NATIVE),
    "linear loss, deferred weights": (
        4,
        "gpt",
        flags(pp=2, stages="Et|ttL", strategy="optim") | LINEAR | {"pipeline_schedule": "zb_h1"},
    ),
    "every module, ZeRO-3": (2, "llama", flags(strategy="optim_grads_params") | EVERYTHING),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", BF16_CASES)
def test_memory_techniques_in_bf16_are_as_close_as_one_device(case: str) -> None:
    world, model, settings = BF16_CASES[case]
    report = verify_in_pool(world, config(MODELS[model], world, **settings, precision="bf16"))
    assert report.passed, report.text()
