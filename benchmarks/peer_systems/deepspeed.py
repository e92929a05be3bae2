"""DeepSpeed on CPU (DS_ACCELERATOR=cpu): ZeRO 0 to 3, AutoTP and its pipeline engine."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor

from benchmarks.peer_systems.common import (
    ADAMW,
    BATCH,
    MICROBATCH,
    Job,
    Model,
    loss_of,
    main,
)
from benchmarks.peer_systems.rows import CLIP, Row

COLUMN = r".*\.(q|k|v|gate|up)_proj\.weight$"
ROW = r".*\.(o|down)_proj\.weight$"


def supports(row: Row) -> bool:
    return row.ep is None and not row.sp and (row.tp == 1 or row.pp == 1)


def build(row: Row) -> Job:
    deepspeed.init_distributed("gloo", verbose=False)
    model = Model()
    if row.pp > 1:
        layers = [model.embed_tokens, *model.layers.values(), model.norm, model.lm_head]
        model = PipelineModule(
            layers, num_stages=row.pp, loss_fn=loss_of, partition_method="type:Block"
        )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config=configuration(row),
    )

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        if row.pp > 1:
            return engine.train_batch(
                zip(tokens_BS.split(MICROBATCH), labels_BS.split(MICROBATCH), strict=True)
            )
        loss = loss_of(engine(tokens_BS), labels_BS)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    dp_rank = engine.mpu.get_data_parallel_rank() if row.pp > 1 else dist.get_rank() // row.tp
    return Job(step, dp_rank)


def configuration(row: Row) -> dict:
    microbatch = MICROBATCH if row.pp > 1 else BATCH // row.dp
    config: dict = {
        "train_micro_batch_size_per_gpu": microbatch,
        "gradient_accumulation_steps": BATCH // row.dp // microbatch,
        "zero_optimization": {"stage": row.zero},
        "gradient_clipping": CLIP,
        "steps_per_print": None,
    }
    if row.tp > 1:
        specs = [
            {"patterns": [COLUMN], "partition_type": "column"},
            {"patterns": [ROW], "partition_type": "row"},
        ]
        config["tensor_parallel"] = {
            "autotp_size": row.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
    return config


if __name__ == "__main__":
    main(build, supports, "deepspeed")
