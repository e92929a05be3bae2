"""Fivefold: its engine as `fivefold train` runs it, on ranks forked by its own launcher."""

import os
import time
from typing import Any

import torch
from torch import Tensor

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
    SEQ,
    TOPK,
    VOCAB,
    Job,
    end,
    measure,
    parse,
)
from benchmarks.peer_systems.rows import CLIP, Row
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING
from fivefold.data.packing import Microbatch
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv

STRATEGIES = tuple(SHARDING)


def supports(row: Row) -> bool:
    return True


def layout_of(row: Row) -> Layout:
    experts: dict[str, Any] = {
        "num_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_ffn_hidden_size": EXPERT_FFN,
    }
    model = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        **({} if row.ep is None else experts),
    )
    config = Config(model).with_values(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        sequence_parallel=row.sp,
        expert_model_parallel_size=row.ep or 1,
        moe_token_dispatcher_type=os.environ.get("PEERS_DISPATCHER", "alltoall"),
        data_parallel_sharding_strategy=STRATEGIES[row.zero],
        micro_batch_size=MICROBATCH if row.pp > 1 else BATCH // row.dp,
        global_batch_size=BATCH,
        seq_length=SEQ,
        precision="fp32",
        lr=ADAMW["lr"],
        lr_decay_style="constant",
        weight_decay=ADAMW["weight_decay"],
        clip_grad=CLIP,
    )
    return check(config, row.ranks)


def build(layout: Layout, env: RankEnv) -> Job:
    engine = Engine(layout, env.rank, init_process_group(env, "cpu"))
    rows = layout.config.training.micro_batch_size

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        positions_BS = torch.arange(SEQ).expand(len(tokens_BS), SEQ).contiguous()
        documents_BS = torch.zeros_like(tokens_BS)
        fields = (tokens_BS, labels_BS, positions_BS, documents_BS, positions_BS)
        parts = zip(*(field.split(rows) for field in fields), strict=True)
        result = engine.step([Microbatch(*(p.numpy() for p in part)) for part in parts])
        return torch.tensor(result.loss)

    return Job(step, layout.grid.dp_rank(env.rank))


def main() -> None:
    imported = time.time()
    row, steps, warmup = parse(supports)
    layout = layout_of(row)

    def rank(env: RankEnv) -> None:
        torch.set_num_threads(1)
        end(measure(build(layout, env), row, steps, warmup, imported))

    raise SystemExit(launch_local(rank, row.ranks))


if __name__ == "__main__":
    main()
