"""Makes the small checkpoints of Megatron-core's training that the tests go on from.

    TORCHDYNAMO_DISABLE=1 python -m tests.convert.make_megatron_training [FOLDER]

Each is of a job that has taken `STEP` steps, as `megatron.training` saves it; beside some is one of
the weights after the next step, of which `batch` gives tokens and labels. It needs megatron-core,
0.16.1, or 0.13.1 (with numpy below 2) for what the later one no longer writes; the tests that read
them do not.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

FOLDER = Path(__file__).parent / "megatron_training"
STEP, LENGTH, VOCABULARY, SAMPLES = 3, 8, 32, 4
RATES: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-2,
        "min_lr": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
    }
)
WARMUP, DECAY = 2, 10
DECAYS = (0.01, 0.1)
"""Steps of the learning rate's warm-up and of its whole decay; weight decay at both ends."""

ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {
        **RATES,
        "iteration": STEP,
        "consumed_train_samples": STEP * SAMPLES,
        "skipped_train_samples": 0,
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "make_vocab_size_divisible_by": 4,
        "mock_data": True,
        "micro_batch_size": 1,
        "global_batch_size": SAMPLES,
        "train_iters": DECAY,
        "lr_warmup_iters": WARMUP,
        "lr_decay_iters": DECAY,
        "lr_decay_style": "cosine",
        "weight_decay_incr_style": "linear",
        "start_weight_decay": DECAYS[0],
        "end_weight_decay": DECAYS[1],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "eval_iters": 0,
    }
)
"""Of Megatron-LM, but for the model's."""

_SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 12,
}
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "sharded": {"config": _SIZES, "tp": 2, "dp": 2, "metadata": _RESHARDABLE},
        "tied": {
            "config": _SIZES
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
            "pp": 2,
        },
        "experts": {
            "config": _SIZES
            | {
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 8,
                "moe_router_load_balancing_type": "none",
                "moe_token_dispatcher_type": "alltoall",
                "moe_layer_freq": [0, 1],
            },
            "ep": 2,
            "dp": 2,
            "metadata": _RESHARDABLE,
            "chained_prefix": True,
        },
        "flat": {
            "config": _SIZES,
            "tp": 2,
            "dp": 2,
            "metadata": {"distrib_optim_sharding_type": "fully_sharded_model_space"},
            "by": "0.13.1",
        },
        "narrow": {"config": _SIZES | {"num_layers": 1}, "dtype": "bfloat16", "next": False},
        "buckets": {
            "config": _SIZES | {"num_layers": 1},
            "metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
            "next": False,
        },
    }
)
"""What each is made of: arguments of `TransformerConfig` and of `GPTModel`, layout and format."""


def make(name: str, folder: Path) -> None:
    """Make one, with the ranks of its layout."""
    from torch.multiprocessing import spawn

    case = CASES[name]
    ranks = case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)
    with tempfile.TemporaryDirectory() as place:
        spawn(_rank, (ranks, f"{place}/store", name, folder / name), ranks)


def batch(step: int) -> tuple[Any, Any]:
    """Tokens and labels of a step, [SAMPLES, LENGTH]."""
    import torch

    tokens = torch.arange(SAMPLES * (LENGTH + 1)).view(SAMPLES, LENGTH + 1)
    tokens = (tokens * (2 * step + 3) + tokens // 5) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _rank(rank: int, ranks: int, store: str, name: str, folder: Path) -> None:
    import torch.distributed as dist

    from benchmarks.peer_systems import megatron  # noqa: F401, which makes it run on a CPU

    # isort: split
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    case = CASES[name]
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        case.get("tp", 1),
        case.get("pp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    job = _Job(case)
    for step in range(STEP):
        job.step(step)
    path = folder / f"iter_{STEP:07d}"
    after = folder / "next" / f"iter_{STEP + 1:07d}"
    if rank == 0:
        path.mkdir(parents=True)
        if case.get("next", True):
            after.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    dist.barrier()
    dist_checkpointing.save(job.saved(), str(path), ("torch_dist", 1))
    if case.get("next", True):
        job.step(STEP)
        dist_checkpointing.save({"model": job.weights()}, str(after), ("torch_dist", 1))
    dist.barrier()
    dist.destroy_process_group()


class _Job:
    """A rank's model and optimizer, as `megatron.training` builds them."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from tests.convert.make_megatron import gpt_model

        self.case = case
        dtype = getattr(torch, case.get("dtype", "float32"))
        settings = {"pipeline_dtype": dtype, "params_dtype": dtype}
        settings["bf16"] = dtype == torch.bfloat16
        sizes = case.get("tp", 1), case.get("pp", 1), VOCABULARY, LENGTH
        experts = {"expert_model_parallel_size": case.get("ep", 1)}
        whole = {**case, "config": case["config"] | settings | experts}
        self.gpt = gpt_model(whole, *sizes, parallel_output=True)
        _initialise(self.gpt)
        shares = "metadata" in case
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=shares)
        self.gpt.to(dtype)
        self.model = DistributedDataParallel(self.gpt.config, ddp, self.gpt)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                use_distributed_optimizer=shares,
                bf16=settings["bf16"],
                params_dtype=dtype,
                weight_decay=DECAYS[0],
                **RATES,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=RATES["lr"],
            min_lr=RATES["min_lr"],
            lr_warmup_steps=WARMUP * SAMPLES,
            lr_decay_steps=DECAY * SAMPLES,
            lr_decay_style="cosine",
            start_wd=DECAYS[0],
            end_wd=DECAYS[1],
            wd_incr_steps=DECAY * SAMPLES,
            wd_incr_style="linear",
        )
        config = self.gpt.config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.model.no_sync
        self.dp = parallel_state.get_data_parallel_world_size()
        self.at = parallel_state.get_data_parallel_rank()

    def step(self, number: int) -> None:
        """Take a step on this rank's part of its batch, a sample at a time."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        each = SAMPLES // self.dp
        mine = slice(self.at * each, (self.at + 1) * each)
        positions_BS = torch.arange(LENGTH)[None]
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

        def forward(samples: Iterator[Any], model: Any) -> Any:
            tokens_S, labels_S = next(samples)
            loss = model(tokens_S[None], positions_BS, mask, labels=labels_S[None])
            return loss, lambda loss: (loss.float().mean(), {})

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=zip(*(part[mine] for part in batch(number)), strict=True),
            model=[self.model],
            num_microbatches=each,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(SAMPLES)

    def weights(self) -> Any:
        """The weights, as they are saved."""
        return self.gpt.sharded_state_dict()

    def saved(self) -> dict[str, Any]:
        """A checkpoint as of megatron.training."""
        from megatron.core.transformer.enums import AttnBackend

        from tests.convert.make_megatron import arguments

        case, model = self.case, self.weights()
        metadata = {**case.get("metadata", {}), "singleton_local_shards": False}
        metadata["chained_optim_avoid_prefix"] = not case.get("chained_prefix", False)
        told = {**arguments(case), **ARGUMENTS, "attention_backend": AttnBackend.auto}
        told["use_distributed_optimizer"] = "metadata" in case
        told["bf16"] = "dtype" in case
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, metadata=metadata),
            "opt_param_scheduler": self.scheduler.state_dict(),
            "args": argparse.Namespace(**told),
            "content_metadata": metadata,
            "iteration": STEP,
            "checkpoint_version": 3.0,
        }


def _initialise(gpt: Any) -> None:
    """The same weights for the same names; parts of other ranks are others."""
    import torch
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_rank()
    ep = parallel_state.get_expert_model_parallel_rank()
    for name, parameter in gpt.named_parameters():
        tied = gpt.share_embeddings_and_output_weights and name == "output_layer.weight"
        of = "embedding.word_embeddings.weight" if tied else name
        split = getattr(parameter, "tensor_model_parallel", False)
        part = ep if ".experts." in name else tp if split else 0
        generator = torch.Generator().manual_seed(crc32(of.encode()) + part)
        parameter.data.normal_(std=0.3, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1


if __name__ == "__main__":
    # A checkpoint keeps the path that it was written to.
    target = Path(sys.argv[1] if len(sys.argv) > 1 else os.path.relpath(FOLDER))
    here = version("megatron-core")
    for case_name, case in CASES.items():
        if here == case.get("by", "0.16.1"):
            make(case_name, target)
