"""megatron-core with its local layers, made to run on CPU by `megatron_cpu`.

Numbers of rows become numpy arrays, as they do on their way from a GPU. Experts are its
`SequentialMLP`, one after the other: the grouped ones need CUDA kernels. gloo gathers even parts
only, so that experts are not split. Without Transformer Engine the attention is the unfused one,
AdamW is PyTorch's, and its `torch.compile` decorators are off (TORCHDYNAMO_DISABLE=1), which
otherwise cost tens of seconds at start-up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_systems import megatron_cpu  # noqa: F401

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from benchmarks.peer_systems.common import (
    ADAMW,
    BATCH,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    MICROBATCH,
    NORM_EPSILON,
    ROPE_BASE,
    SEQ,
    TOPK,
    VOCAB,
    Job,
    initial,
    main,
)
from benchmarks.peer_systems.megatron_parts import LLAMA, llama_layers
from benchmarks.peer_systems.rows import CLIP, Row

moe_utils.te_general_gemm = (
    None  # it asks for this name, and imports it only from Transformer Engine
)
token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
    tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
)
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def supports(row: Row) -> bool:
    return row.zero <= 1


def build(row: Row) -> Job:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        row.tp,
        row.pp,
        expert_model_parallel_size=row.ep or 1,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    config = configuration(row)
    gpt = GPTModel(
        config,
        llama_layers(None if row.ep is None else EXPERTS),
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        rotary_base=ROPE_BASE,
    )
    load_initial(gpt)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=row.dp > 1, use_distributed_optimizer=row.zero == 1
        ),
        gpt,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=ADAMW["lr"],
            adam_beta1=ADAMW["betas"][0],
            adam_beta2=ADAMW["betas"][1],
            weight_decay=ADAMW["weight_decay"],
            clip_grad=CLIP,
            use_distributed_optimizer=row.zero == 1,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    forward_backward = get_forward_backward_func()
    microbatch = MICROBATCH if row.pp > 1 else BATCH // row.dp
    positions_BS = torch.arange(SEQ).expand(microbatch, SEQ)

    def forward(data, model):
        tokens_BS, labels_BS = next(data)
        loss_BS = model(tokens_BS, positions_BS, None, labels=labels_BS)
        return loss_BS, lambda loss_BS: (loss_BS.mean(), {"loss": loss_BS.mean().detach()})

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor | None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        done = forward_backward(
            forward_step_func=forward,
            data_iterator=zip(
                tokens_BS.split(microbatch), labels_BS.split(microbatch), strict=True
            ),
            model=[model],
            num_microbatches=BATCH // row.dp // microbatch,
            seq_length=SEQ,
            micro_batch_size=microbatch,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([part["loss"] for part in done]).mean() if last else None

    return Job(step, parallel_state.get_data_parallel_rank())


def configuration(row: Row) -> TransformerConfig:
    experts = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": row.ep,
        "expert_tensor_parallel_size": 1,
    }
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        layernorm_epsilon=NORM_EPSILON,
        attention_softmax_in_fp32=True,
        perform_initialization=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        sequence_parallel=row.sp,
        **LLAMA,
        **({} if row.ep is None else experts),
    )


@torch.no_grad()
def load_initial(gpt: GPTModel) -> None:
    """Give every parameter the value that the other systems start from.

    Megatron keeps q, k and v together head by head, and gate and up one after the other.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()

    def whole(prefix: str, rows: int, columns: int, *names: str) -> Tensor:
        return torch.stack([initial(f"{prefix}{name}.weight", (rows, columns)) for name in names])

    def load(weight: Any, full: Tensor, dim: int) -> None:
        weight.copy_(full.chunk(tp, dim)[rank].reshape(weight.shape))
        weight.tensor_model_parallel = tp > 1  # what its norm goes by, set where it initialises

    if gpt.pre_process:
        embedding = gpt.embedding.word_embeddings.weight
        load(embedding, initial("embed_tokens.weight", (VOCAB, HIDDEN)), 0)
    if gpt.post_process:
        load(gpt.output_layer.weight, initial("lm_head.weight", (VOCAB, HIDDEN)), 0)
    for layer in gpt.decoder.layers:
        attention, mlp = (
            f"layers.{layer.layer_number - 1}.{name}." for name in ("self_attn", "mlp")
        )
        qkv = whole(attention, HIDDEN, HIDDEN, "q_proj", "k_proj", "v_proj")
        by_head = qkv.unflatten(1, (HEADS, -1)).transpose(0, 1)
        load(layer.self_attention.linear_qkv.weight, by_head, 0)
        load(layer.self_attention.linear_proj.weight, whole(attention, HIDDEN, HIDDEN, "o_proj"), 2)
        if hasattr(layer.mlp, "router"):
            load_experts(layer.mlp, mlp)
            continue
        load(layer.mlp.linear_fc1.weight, whole(mlp, FFN, HIDDEN, "gate_proj", "up_proj"), 1)
        load(layer.mlp.linear_fc2.weight, whole(mlp, HIDDEN, FFN, "down_proj"), 2)


@torch.no_grad()
def load_experts(moe: torch.nn.Module, prefix: str) -> None:
    """The same for a mixture of experts: its router, and this rank's experts."""
    moe.router.weight.copy_(initial(f"{prefix}router.weight", (EXPERTS, HIDDEN)))
    for number, expert in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
        weight = f"{prefix}experts.{number}."
        into = torch.stack(
            [
                initial(f"{weight}{name}.weight", (EXPERT_FFN, HIDDEN))
                for name in ("gate_proj", "up_proj")
            ]
        )
        expert.linear_fc1.weight.copy_(into.flatten(0, 1))
        expert.linear_fc2.weight.copy_(initial(f"{weight}down_proj.weight", (HIDDEN, EXPERT_FFN)))


if __name__ == "__main__":
    main(build, supports, "megatron-core")
