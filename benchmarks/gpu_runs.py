"""Training steps of models of real size on one GPU, held against theory and the planner.

    python -m benchmarks.gpu_runs [--dry]

The engine of `fivefold train` on random tokens, packed into documents: no corpus, no checkpoints.
Each model takes a few steps, and one more that is measured, which no graph replays. Prints a line
of JSON for each quantity of each model, as `fivefold audit` compares them. `--dry` runs small
models on a CPU.
"""

import gc
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_layers import LLAMA, ONE, seconds, tell
from fivefold.audit.measure import measured
from fivefold.audit.record import read_records
from fivefold.audit.report import audit
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.data.packing import Microbatch, Packing, pack
from fivefold.hardware import find_gpu
from fivefold.layout import Layout
from fivefold.report.audited import outlook
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.rank_env import RankEnv

WARMUP, STEPS = 3, 5
VOCABULARY = 32_768
ONE_B = replace(ONE, num_layers=16, vocab_size=VOCABULARY)
EIGHT_B = replace(LLAMA, num_layers=8, vocab_size=VOCABULARY)
LITE = replace(
    PRESETS["deepseek-v2-lite"],
    num_layers=3,
    moe_layer_freq="[0]*1+[1]*2",
    vocab_size=VOCABULARY,
)
SHORT = {"seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 8}
SMALLER = {"seq_length": 2048, "global_batch_size": 8}
LONG = {"seq_length": 8192, "global_batch_size": 4}
LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": (1,),
}
WHOLE = {"reset_attention_mask": False}
GRAPH = {"cuda_graph_impl": "local"}
FP8 = {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}
Runs = Mapping[str, tuple[ModelConfig, dict[str, Any]]]
RUNS: Runs = {
    "1B": (ONE_B, SHORT),
    "1B, compiled": (ONE_B, SHORT | {"compile": True}),
    "1B, whole rows": (ONE_B, SHORT | WHOLE),
    "1B, whole rows, one graph": (ONE_B, SHORT | WHOLE | GRAPH),
    "1B, 8 x 2,048 tokens": (ONE_B, SMALLER | WHOLE),
    "1B, 8 x 2,048 tokens, one graph": (ONE_B, SMALLER | WHOLE | GRAPH),
    "1B, whole rows, fp8, one graph": (ONE_B, SHORT | WHOLE | GRAPH | FP8),
    "eight layers of 8B": (EIGHT_B, LONG),
    "eight layers of 8B, whole rows": (EIGHT_B, LONG | WHOLE),
    "eight layers of 8B, whole rows, fp8": (EIGHT_B, LONG | WHOLE | FP8),
    "eight layers of 8B, whole rows, compiled, native loss": (
        EIGHT_B,
        LONG | WHOLE | {"compile": True, "cross_entropy_loss_fusion": True},
    ),
    "eight layers of 8B, whole rows, recomputed, linear loss": (
        EIGHT_B,
        LONG | WHOLE | FULL | LINEAR,
    ),
    "two layers of Mixtral 8x7B": (
        replace(PRESETS["mixtral-8x7b"], num_layers=2),
        {"seq_length": 4096, "global_batch_size": 4},
    ),
    "three layers of DeepSeek-V2 lite": (LITE, {"seq_length": 4096, "global_batch_size": 4}),
}
SMALL = {"seq_length": 64, "global_batch_size": 4}
DRY_RUNS: Runs = {
    "small": (PRESETS["debug-llama"], SMALL),
    "small, linear loss": (PRESETS["debug-llama"], SMALL | LINEAR),
    "small, whole rows": (PRESETS["debug-llama"], SMALL | WHOLE),
    "small with experts": (PRESETS["debug-mixtral"], SMALL),
}


def batches(layout: Layout) -> list[Microbatch]:
    """Random tokens in documents of some 500, of which each row may be one for attention."""
    training, model = layout.config.training, layout.config.model
    random = np.random.default_rng(1)
    shape = training.micro_batch_size, training.seq_length + 1
    apart = layout.config.data.reset_attention_mask
    rules = Packing(training.seq_length, eod_id=0, reset_attention_mask=apart)
    made = []
    for number in range(layout.num_microbatches):
        windows = random.integers(1, model.vocab_size, shape)
        windows[random.random(shape) < 1 / 500] = rules.eod_id
        indices = np.arange(shape[0]) + number * shape[0]
        made.append(pack(windows, indices, rules))
    return made


def rows(runs: Runs, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each quantity of each model, predicted for this GPU, or an H100 in its place."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    cluster = "H100" if gpu is None else gpu.name
    for name, (model, settings) in runs.items():
        config = Config(model).with_values(precision="bf16", **settings)
        layout = check(config, 1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        engine = Engine(layout, 0, device)
        microbatches = batches(layout)

        def step(engine: Engine = engine, microbatches: Any = microbatches) -> None:
            engine.step(microbatches)

        for _ in range(WARMUP):
            step()
        usual = statistics.median(seconds(step, device) for _ in range(STEPS))
        if device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
            yield {"model": name, "quantity": "memory reserved", "measured": reserved}
        with tempfile.TemporaryDirectory() as folder:
            with measured(engine, 1, Path(folder)):
                step()
            records = read_records(Path(folder))
            report = audit(name, layout, records, usual, outlook(layout, records, cluster))
        for finding in report.findings:
            yield {
                "model": name,
                "quantity": finding.name,
                "predicted": finding.predicted,
                "measured": finding.measured,
            }
        del engine, step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    def made(dry: bool) -> Iterator[dict[str, Any]]:
        device = init_process_group(RankEnv(), "cpu" if dry else "cuda")
        return rows(DRY_RUNS if dry else RUNS, device)

    tell(made, __doc__)


if __name__ == "__main__":
    main()
