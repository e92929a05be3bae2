"""Every derived number, and the table of them."""

from dataclasses import replace

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.counts.derived import as_table, describe


def config(model: str, **values: object) -> Config:
    changed = replace(PRESETS[model], attention_dropout=0.0, hidden_dropout=0.0)
    return Config(changed).with_values(seq_length=16, precision="fp32", **values)


def test_every_number_comes_with_its_product() -> None:
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout = check(config("debug-llama", global_batch_size=16, **values), 8)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["world"] == ("8", "pp 2 x dp 2 x cp 1 x tp 2")
    assert told["microbatches"] == ("8", "global batch 16 / (micro batch 1 x dp 2)")
    assert told["tokens per step"] == ("256", "global batch 16 x sequence 16")
    assert told["padded vocabulary"] == ("512", "512 rounded up to a multiple of 128")
    assert told["parameters"][0] == "263 K"
    assert told["largest stage"] == ("131 K", "of 131 K + 131 K")


def test_the_forwards_that_run_twice_are_told() -> None:
    values = {"pipeline_model_parallel_size": 2, "recompute_in_flight_limit": 1}
    layout = check(config("debug-llama", global_batch_size=8, **values), 2)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["forwards run twice"][0] == "7 of 16"


def test_the_microbatches_whose_weight_gradients_wait_are_told() -> None:
    def waits(pp: int, schedule: str, strategy: str = "no_shard") -> tuple[str, str]:
        settings = config(
            "debug-llama",
            global_batch_size=16,
            pipeline_model_parallel_size=pp,
            pipeline_schedule=schedule,
            data_parallel_sharding_strategy=strategy,
        )
        rows = {name: (value, why) for name, value, why in describe(check(settings, 4))}
        return rows.get("dW waits", ("", ""))

    assert waits(1, "1f1b") == ("", "")
    assert waits(4, "1f1b") == ("", "")  # W follows B at once
    # On rank r of ZB-H1, W lags r backwards; B runs before the W that makes room.
    assert waits(4, "zb_h1")[0] == "4 x microbatch"
    assert waits(2, "zb_h1", "optim")[1].endswith("summed unsharded")
    assert waits(2, "zb_h1", "optim_grads")[1].endswith("reduced block by block when computed")


def test_experts_and_what_a_token_sees_of_them_are_told() -> None:
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    settings = config("deepseek-v3", expert_model_parallel_size=8, global_batch_size=8, **sizes)
    layout = check(settings, 16, planned=True)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["expert parallel"] == ("8", "ep 8 x etp 1 x 2 copies = 16 ranks of a stage")
    assert told["parameters"] == (
        "683 B",
        "embedding 927 M + 3 dense layers x 583 M + 58 layers with experts x 11.5 B + head 927 M "
        "+ further prediction 11.6 B",
    )
    assert told["active parameters"] == ("38.2 B", "8 of 256 experts for each token")
    assert "left out" not in told


def test_the_table_is_aligned() -> None:
    assert as_table([("a", "1", "x"), ("long", "22", "")]) == "a      1  x\nlong  22"
