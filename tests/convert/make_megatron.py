"""Makes the small checkpoints of Megatron-core that the tests read, with its own logits.

    TORCHDYNAMO_DISABLE=1 python -m tests.convert.make_megatron [FOLDER]

It needs megatron-core (0.16.1 made those that are here); the tests that read them do not.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parent / "megatron"
STEP, LENGTH, VOCABULARY, PADDED = 3, 12, 60, 64

_LLAMA = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 8,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "llama": {"config": _LLAMA, "tp": 2, "pp": 2},
        "gpt2": {
            "config": _LLAMA
            | {
                "num_query_groups": 4,
                "normalization": "LayerNorm",
                "gated_linear_unit": False,
                "add_bias_linear": True,
            },
            "gelu": True,
            "model": {
                "position_embedding_type": "learned_absolute",
                "share_embeddings_and_output_weights": True,
            },
        },
        "mixtral": {"config": _LLAMA | _EXPERTS | {"num_query_groups": 4}},
        "mixed": {
            "config": _LLAMA
            | _EXPERTS
            | {
                "moe_layer_freq": [0, 1],
                "moe_shared_expert_intermediate_size": 8,
                "qk_layernorm": True,
                "kv_channels": 8,
            },
        },
        "apart": {
            "config": _LLAMA | _EXPERTS | {"moe_layer_freq": [0, 1]},
            "metadata": {"singleton_local_shards": True},
        },
    }
)
"""What each is made of: arguments of `TransformerConfig` and of `GPTModel`, and the layout."""


def make(name: str, folder: Path) -> None:
    """Make one checkpoint, with the ranks of its layout."""
    from torch.multiprocessing import spawn

    case = CASES[name]
    ranks = case.get("tp", 1) * case.get("pp", 1)
    with tempfile.TemporaryDirectory() as place:
        spawn(_rank, (ranks, f"{place}/store", name, folder / name), ranks)


def _rank(rank: int, ranks: int, store: str, name: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.peer_systems import megatron  # noqa: F401, which makes it run on a CPU

    # isort: split
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.enums import AttnBackend
    from safetensors.torch import save_file

    case = CASES[name]
    tp, pp = case.get("tp", 1), case.get("pp", 1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    gpt = gpt_model(case, tp, pp, PADDED, LENGTH, parallel_output=False).eval()
    torch.manual_seed(rank)
    shared = torch.Generator().manual_seed(7)
    for parameter_name, parameter in gpt.named_parameters():
        split = getattr(parameter, "tensor_model_parallel", False)
        parameter.data.normal_(std=0.3, generator=None if split else shared)
        if "layernorm.weight" in parameter_name:
            parameter.data += 1
    path = folder / f"iter_{STEP:07d}"
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    # As of megatron.training: a moment, with which alone no run goes on, and arguments of foreign
    # classes.
    moment = dist_checkpointing.ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight",
        torch.ones(16),
        replica_id=rank,
    )
    saved = {
        "model": gpt.sharded_state_dict(metadata=case.get("metadata")),
        "optimizer": {"moment": moment},
        "args": argparse.Namespace(**arguments(case), attention_backend=AttnBackend.auto),
        "iteration": STEP,
        "checkpoint_version": 3.0,
    }
    dist_checkpointing.save(saved, str(path), ("torch_dist", 1))
    tokens, logits = _logits(gpt, rank, tp, pp)
    if rank == ranks - 1:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
        save_file({"tokens": tokens, "logits": logits}, folder / "oracle.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def gpt_model(
    case: Mapping[str, Any],
    tp: int,
    pp: int,
    rows: int,
    length: int,
    *,
    parallel_output: bool,
) -> Any:
    """This rank's part of a model.

    Args:
        case: as in `CASES`.
        tp: ranks of tensor parallelism.
        pp: stages of the pipeline.
        rows: entries of the vocabulary, with padding.
        length: tokens of the longest sequence.
        parallel_output: whether each rank gets its part of the logits only.
    """
    import torch
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from benchmarks.peer_systems.megatron_parts import LLAMA

    kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
    WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps, **__: kinds[
        config.normalization
    ](hidden_size, eps)
    settings = {**LLAMA, "pipeline_dtype": torch.float32, **case["config"]}
    if case.get("gelu"):
        settings["activation_func"] = F.gelu
    config = TransformerConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **settings
    )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if "num_moe_experts" not in settings or "moe_layer_freq" not in settings:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=settings.get("num_moe_experts"), normalization=config.normalization
        )
    how = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(
        config,
        spec,
        rows,
        length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=parallel_output,
        **how | case.get("model", {}),
    )


def arguments(case: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the model."""
    config = {**case["config"], "norm_epsilon": 1e-5, "swiglu": not case.get("gelu")}
    config["num_experts"] = config.pop("num_moe_experts", None)
    config["group_query_attention"] = config["num_query_groups"] != config["num_attention_heads"]
    how = case.get("model", {})
    tied = how.get("share_embeddings_and_output_weights", False)
    config["untie_embeddings_and_output_weights"] = not tied
    config["position_embedding_type"] = how.get("position_embedding_type", "rope")
    return {"normalization": "RMSNorm", "rotary_base": 10000, "add_bias_linear": False} | config


def _logits(gpt: Any, rank: int, tp: int, pp: int) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    tokens_BS = torch.arange(LENGTH)[None] * 7 % VOCABULARY
    positions_BS = torch.arange(LENGTH)[None]
    with torch.no_grad():
        if not gpt.pre_process:
            hidden = torch.empty(LENGTH, 1, gpt.config.hidden_size)
            dist.recv(hidden, rank - tp)
            gpt.set_input_tensor(hidden)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        out = gpt(tokens_BS, positions_BS, mask)
        if not gpt.post_process:
            dist.send(out, rank + tp)
    return tokens_BS[0], out[0, :, :VOCABULARY].contiguous()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for case_name in CASES:
        make(case_name, target)
