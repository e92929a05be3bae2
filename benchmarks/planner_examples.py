"""What the planner says of runs that papers describe: docs/explanation/planner-examples.md.

    python -m benchmarks.planner_examples

Layouts are those that the papers name; what they do not name is in the calls below.
"""

import argparse
from dataclasses import replace
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.predict.cluster import preset
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from fivefold.reliability import checkpoint_seconds, goodput

# 102 billion parameters, 12 of them for a token.
SOLAR = ModelConfig(
    num_layers=48,
    hidden_size=4096,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=128,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=1280,
    moe_shared_expert_intermediate_size=1280,
    vocab_size=196608,
    max_position_embeddings=8192,
)
FULL: dict[str, Any] = {"recompute_granularity": "full", "micro_batch_size": 1}
PIPELINE = {"pipeline_model_parallel_size": 16, **FULL}
KIMI_STAGES = "Ett|(tt|)*28t|t|tL"  # 61 layers on 16 ranks of two stages
DEEPSEEK_STAGES = "Et*4|(t*4|)*12t*3|t*3|t*3L"


def show(name: str, model: ModelConfig, gpu: str, gpus: int, batch: int, **settings: Any) -> None:
    """Print the prediction of one layout."""
    config = Config(model).with_values(global_batch_size=batch, **settings)
    layout = check(config, gpus, planned=True)
    cluster = preset(gpu, gpus)
    found, memory = predict(layout, cluster), peak_memory(layout, cluster)
    parts = {part.name: part.seconds / found.step_time for part in found.parts}
    most = sorted(parts, key=lambda part: -parts[part])[:3]
    print(
        f"{name:<34}{found.step_time:>7.1f} s{found.tokens_per_second_per_gpu:>8,.0f} tokens/s"
        f"{memory.max_allocated / 2**30:>7.1f} GiB  "
        + ", ".join(f"{part} {parts[part]:.0%}" for part in most)
    )


def main() -> None:
    """Print every example."""
    sharded = {"data_parallel_sharding_strategy": "optim_grads_params", "seq_length": 4096, **FULL}
    for batch in (2, 4, 8):
        for gpus in (128, 480):
            name = f"Solar Open, FSDP on {gpus}, {batch} each"
            show(name, SOLAR, "B200", gpus, gpus * batch, **{**sharded, "micro_batch_size": batch})
    groups = {"num_distributed_optimizer_instances": 6, "micro_batch_size": 4}
    show("Solar Open, HSDP 80 x 6, 4 each", SOLAR, "B200", 480, 1920, **{**sharded, **groups})

    once = {"data_parallel_sharding_strategy": "optim", **PIPELINE}
    kimi = {"expert_model_parallel_size": 16, "pipeline_model_parallel_layout": KIMI_STAGES}
    for gpus in (256, 512, 2048):
        name = f"Kimi K2, pp 16 ep 16 on {gpus}"
        show(name, PRESETS["kimi-k2"], "H800", gpus, 4 * gpus, seq_length=4096, **once, **kimi)

    deepseek = replace(PRESETS["deepseek-v3"], mtp_num_layers=0)
    stages = {"expert_model_parallel_size": 64, "pipeline_model_parallel_layout": DEEPSEEK_STAGES}
    for strategy in ("optim", "optim_grads"):
        longer = {"context_parallel_size": 2, "seq_length": 8192, **stages, **PIPELINE}
        longer["data_parallel_sharding_strategy"] = strategy
        show(f"pp 16 ep 64 cp 2, {strategy}", deepseek, "H800", 2048, 8192, **longer)

    for gpus in (1024, 4096, 16384, 65536):
        found = goodput(gpus, checkpoint_seconds(405.9e9 * 12, gpus // 8))
        print(
            f"Llama 3 405B, {gpus:>6,} GPUs: an interruption every {found.mtbf / 3600:.1f} h, a "
            f"checkpoint every {found.interval / 60:.1f} min, {found.share:.1%} of the time trains"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    main()
