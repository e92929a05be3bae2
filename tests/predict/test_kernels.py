"""The kernels behind the kernel efficiency: they sum up to it, in any layout."""

import random
from dataclasses import replace
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.predict.cluster import preset
from fivefold.predict.software import Software
from fivefold.predict.step import predict, predict_all
from fivefold.predict.times.kernels import HOST, MEMORY_BOUND, kernels
from fivefold.tell.efficiency import opened

MODELS = ("llama3-8b", "deepseek-v3", "mixtral-8x7b", "gpt-oss-20b", "gpt3-175b", "gpt2")


def _drawn(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    pick = rng.choice
    return {
        "tensor_model_parallel_size": pick((1, 2, 4)),
        "context_parallel_size": pick((1, 1, 2)),
        "pipeline_model_parallel_size": pick((1, 2, 4)),
        "expert_model_parallel_size": pick((1, 4)),
        "sequence_parallel": True,
        "tp_comm_overlap": pick((False, True)),
        "lora_rank": pick((None, None, 8)),
        "global_batch_size": 64,
        "seq_length": pick((512, 4096)),
        "fp8_format": pick((None, None, "hybrid")),
        "cross_entropy_loss_fusion": pick((False, True)),
        "recompute_granularity": pick((None, None, "full")),
        "pipeline_schedule": pick(("1f1b", "1f1b", "zb_h1")),
    }


@pytest.mark.parametrize("part", range(2))
def test_they_sum_up_to_the_parts_of_the_step(part: int) -> None:
    legal, names = 0, set()
    for seed in range(part, 400, 2):
        model = PRESETS[MODELS[seed // 2 % len(MODELS)]]
        values = _drawn(seed)
        if values["tensor_model_parallel_size"] == 1:
            values |= {"sequence_parallel": False, "tp_comm_overlap": False}
        try:
            layout = check(Config(model).with_values(**values), 16, planned=True)
        except ConfigError:
            continue
        legal += 1
        cluster = preset("H100", 16)
        software = Software(fused=seed % 3 > 0)
        (whole,) = predict_all([layout], cluster, software)
        parts = {each.name: each.seconds for each in whole.parts}
        found = kernels(whole)
        names |= {each.name for each in found}
        ideal, excess = sum(k.ideal for k in found), sum(k.excess for k in found)
        assert ideal == pytest.approx(parts["ideal"], rel=1e-9)
        assert excess == pytest.approx(parts["kernel efficiency"], rel=1e-9)
        assert all(each.seconds >= 0 and each.share_of_peak < 1 for each in found)
        assert [each.excess for each in found] == sorted((k.excess for k in found), reverse=True)
        (never_late,) = predict_all([layout], replace(cluster, host_operation=0.0), software)
        assert HOST not in [each.name for each in kernels(never_late)]
        *rows, last = opened(whole)
        assert max(map(len, rows)) <= 110
        assert rows[-1].startswith("all")
        assert last.startswith("lost")
    assert legal > 30
    assert {HOST, MEMORY_BOUND, "expert_fc1", "mla_up", "core_attn", "fc2", "prediction"} <= names


def test_shapes_are_those_of_one_rank() -> None:
    values = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    layout = check(Config(PRESETS["llama3-8b"]).with_values(seq_length=4096, **values), 8)
    shapes = {each.name: each.shape for each in kernels(predict(layout, preset("H100", 8)))}
    assert shapes["qkv"] == "8,192 x 3,072 x 4,096"
    assert shapes["fc1"] == "8,192 x 14,336 x 4,096"
    assert shapes["fc2"] == "8,192 x 4,096 x 7,168"
    assert shapes["output layer"] == "8,192 x 64,128 x 4,096"
    assert shapes["core_attn"] == "4,096 tokens, 16 heads of 128"
