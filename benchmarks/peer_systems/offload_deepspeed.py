"""DeepSpeed on CPU with its optimizer, and its parameters, offloaded; bf16 with fp32 masters."""

import time

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_systems.common import ADAMW, BATCH, Job, Model, end, loss_of, measure
from benchmarks.peer_systems.offload_ways import Asked, asked
from benchmarks.peer_systems.rows import CLIP


def build(given: Asked) -> Job:
    deepspeed.init_distributed("gloo", verbose=False)
    model = Model()
    settings = {name: ADAMW[name] for name in ("lr", "betas", "weight_decay")}
    places = {"offload_optimizer": given.way.optimizer, "offload_param": given.way.weights}
    offload = {
        name: {"device": place} | ({"nvme_path": given.folder} if place == "nvme" else {})
        for name, place in places.items()
        if place is not None
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH // given.row.dp,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": given.way.zero, **offload},
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": settings},
            "steps_per_print": None,
        },
    )

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # rotary tables are fp32
            logits = engine(tokens_BS)
        loss = loss_of(logits.float(), labels_BS)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Job(step, dist.get_rank())


def main() -> None:
    imported = time.time()
    given = asked()
    torch.set_num_threads(1)
    end(measure(build(given), given.row, given.steps, given.warmup, imported))


if __name__ == "__main__":
    main()
