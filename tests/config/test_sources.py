import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.config.config import SECTIONS, Config
from fivefold.config.flags import ALIASES, SWITCHES
from fivefold.config.huggingface import from_hf_config
from fivefold.config.presets import PRESETS
from fivefold.config.settings import argument, option, settings_of
from fivefold.config.sources import load, load_options, read_config, recipe_names, to_toml
from fivefold.errors import ConfigError
from fivefold.hardware import GPUS
from fivefold.predict.cluster_file import load_cluster

GPT2 = {
    **{"model_type": "gpt2", "n_embd": 32, "n_head": 4},
    **{"n_layer": 2, "n_positions": 32, "vocab_size": 100},
}


@dataclass(frozen=True)
class Options:
    """Of a verb."""

    recipe: str | None = argument("a recipe", None)
    times: int = option(1, "how often")
    loud: bool = option(False, "say so")


def config(command_line: str) -> Config:
    return load(command_line.split(), Options)[1]


@pytest.mark.parametrize("name", PRESETS)
def test_resolved_config_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config(PRESETS[name])))
    assert read_config(path) == Config(PRESETS[name])


WRITTEN = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


@given(
    st.text(WRITTEN, min_size=1).filter(lambda t: t != "none"),
    st.lists(st.text(WRITTEN, min_size=1), min_size=1),
    st.floats(allow_nan=False, allow_infinity=False),
)
@example('\x7f\n\t"\\', ["\r"], 1e-300)
def test_any_value_reads_back_as_itself(
    tmp_path_factory: pytest.TempPathFactory, text: str, texts: list[str], number: float
) -> None:
    values = {"text_key": text, "save": text, "data_path": tuple(texts), "lr": number}
    config = Config(PRESETS["gpt2"]).with_values(**values)
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert read_config(path) == config


def test_a_list_is_empty_only_where_a_flag_can_say_so(tmp_path: Path) -> None:
    lists = [(of, s) for of, cls in SECTIONS.items() for s in settings_of(cls) if s.many]
    assert len(lists) > 10
    path = tmp_path / "recipe.toml"
    for section, setting in lists:
        path.write_text(f"[{section}]\n{setting.name} = []\n")
        if setting.default == ():
            assert read_config(path, model="gpt2").value(setting.name) == ()
            assert config(f"--model gpt2 {setting.flag} none").value(setting.name) == ()
        else:
            with pytest.raises(ConfigError, match=rf"\[{section}\] {setting.name} .* \[\]"):
                read_config(path, model="gpt2")


def test_a_mark_of_utf_8_before_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    recipe, model = tmp_path / "recipe.toml", tmp_path / "config.json"
    recipe.write_text(f'[model]\npreset = "{model}"\n', encoding="utf-8-sig")
    model.write_text(json.dumps(GPT2), encoding="utf-8-sig")
    assert read_config(recipe).model == from_hf_config(GPT2)


@pytest.mark.parametrize("made", [Path.touch, Path.mkdir])
def test_files_in_the_folder_change_no_name_that_is_known(
    made: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a log in `demo`, or results in `H100`."""
    monkeypatch.chdir(tmp_path)
    for name in {*recipe_names(), *PRESETS, *GPUS, "h100"}:
        made(tmp_path / name)
    assert all(read_config(name).model.num_layers for name in recipe_names())
    assert read_config("debug", model="gpt2").model == PRESETS["gpt2"]
    assert [load_cluster(name).name for name in (*GPUS, "h100")] == [*GPUS, "H100"]
    if made is Path.touch:
        Path("demo").write_text('[model]\npreset = "gpt2"\n')
        assert read_config("./demo").model == PRESETS["gpt2"] != read_config("demo").model


def test_flags_count_more_than_the_recipe_and_the_recipe_more_than_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[model]\npreset = "debug-llama"\nnum_layers = 6\nvocab_size = 300\n'
        "[optimizer]\nlr = 1\nmin_lr = 0.5\n"
    )
    read = config(f"{recipe} --vocab-size 400 --lr 2")
    expected = replace(PRESETS["debug-llama"], num_layers=6, vocab_size=400)
    assert read.model == expected
    assert (read.optimizer.lr, read.optimizer.min_lr) == (2.0, 0.5)
    assert read.optimizer.adam_beta1 == 0.9
    assert type(read.optimizer.lr) is float


def test_model_flag_replaces_the_whole_section(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\npreset = "debug-llama"\nnum_layers = 6\n')
    read = config(f"{recipe} --model debug-gpt --vocab-size 300")
    assert read.model == replace(PRESETS["debug-gpt"], vocab_size=300)


def test_weights_to_start_from_say_which_model_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    with pytest.raises(ConfigError, match="works: --model llama3-8b"):
        load(["--load", str(folder)], Options)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"works: --model '{folder}'$"):
        load(["--load", str(folder)], Options)


def test_a_model_can_be_written_out_without_a_preset() -> None:
    read = config("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 9")
    assert (read.model.num_layers, read.model.hidden_size, read.model.vocab_size) == (2, 8, 9)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--tensor-model-parallel-size 4", "tensor_model_parallel_size", 4),
        ("--tensor_model_parallel_size=4", "tensor_model_parallel_size", 4),
        ("--tp 2 --tp 4", "tensor_model_parallel_size", 4),
        ("--vpp 2", "num_virtual_stages_per_pipeline_rank", 2),
        ("--virtual-pipeline-model-parallel-size 2", "num_virtual_stages_per_pipeline_rank", 2),
        ("--dp-shard -1", "data_parallel_shard_size", -1),
        ("--sequence-parallel", "sequence_parallel", True),
        ("--sequence-parallel=true", "sequence_parallel", True),
        ("--no-overlap-grad-reduce", "overlap_grad_reduce", False),
        ("--overlap-grad-reduce=False", "overlap_grad_reduce", False),
        ("--keep-latest-k none", "keep_latest_k", None),
        ("--data-path 0.3 a 0.7 b --lr 1", "data_path", ("0.3", "a", "0.7", "b")),
        ("--data-path=a", "data_path", ("a",)),
        ("--lr 3e-4", "lr", 3e-4),
        ("--global-batch-size 1_024", "global_batch_size", 1024),
        ("--fp64", "precision", "fp64"),
        ("--bf16 --precision bf16", "precision", "bf16"),
        ("--use-distributed-optimizer", "data_parallel_sharding_strategy", "optim"),
        ("--swiglu", "gated_linear_unit", True),
        ("--swiglu", "activation_func", "silu"),
        ("--squared-relu", "gated_linear_unit", False),
        ("--squared-relu", "activation_func", "squared_relu"),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--group-query-attention --num-query-groups 1", "num_query_groups", 1),
        ("--layernorm-epsilon 1e-6", "norm_epsilon", 1e-6),
    ],
)
def test_spellings(flags: str, name: str, value: object) -> None:
    read = config(f"--model debug-gpt {flags}")
    assert [getattr(s, name) for _, s in read.sections() if hasattr(s, name)] == [value]


FUSIONS = {
    "masked_softmax_fusion": None,
    "persist_layer_norm": None,
    "bias_gelu_fusion": "bias_gelu_fusion",
    "bias_swiglu_fusion": "bias_swiglu_fusion",
    "bias_dropout_fusion": "bias_dropout_fusion",
    "rope_fusion": "rope_fusion",
    "apply_rope_fusion": "rope_fusion",
    "cross_entropy_loss_fusion": "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "fused_residual_rmsnorm": "fused_residual_rmsnorm",
}


@pytest.mark.parametrize(("name", "setting"), FUSIONS.items())
def test_every_fusion_of_megatron_can_be_switched_both_ways(name: str, setting: str | None) -> None:
    flag = name.replace("_", "-")
    each = [config(f"--model debug-llama --{no}{flag}") for no in ("", "no-")]
    if setting is None:
        assert each == [config("--model debug-llama")] * 2
    else:
        assert [one.value(setting) for one in each] == [True, False]


def test_a_verb_has_options_of_its_own() -> None:
    options, _ = load(["--times", "3", "debug", "--loud"], Options)
    assert options == Options("debug", 3, True)
    assert load_options(["--no-loud", "--", "--times"], Options) == Options("--times")


def test_a_switch_of_the_run_is_unknown_to_a_verb_without_one() -> None:
    with pytest.raises(ConfigError, match="unknown flag --swiglu"):
        load_options(["--swiglu"], Options)


def test_flags_and_recipe_are_complained_about_together(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[model]\npreset = 'gpt2'\n[training]\nseeed = 1\nlr = 2\n")
    with pytest.raises(ConfigError) as caught:
        load([str(recipe), "--tpp", "2", "--times", "x"], Options)
    assert len(caught.value.mistakes) == 4


def test_names_are_unique_and_aliases_and_switches_name_what_exists() -> None:
    names = [field.name for section in SECTIONS.values() for field in fields(section)]
    assert len(set(names)) == len(names)
    assert set(ALIASES.values()) <= {*names, "model", "from_runs"}  # the last is of `plan`
    assert {name for implied in SWITCHES.values() for name in implied} <= set(names)
    assert not set(names) & (set(ALIASES) | set(SWITCHES))


def test_every_field_has_a_help_and_a_type_that_flags_can_say() -> None:
    for section in SECTIONS.values():
        for setting in settings_of(section):
            assert setting.help
            assert setting.kind in (bool, int, float, str)


def test_recipes_are_found_by_name() -> None:
    small = {"debug", "debug-deepseek-v3", "debug-gpt-oss", "debug-mixtral", "demo", "demo-moe"}
    assert small | {"gpt2", "llama3-405b", "llama3-8b", "qwen3-8b"} == set(recipe_names())


def test_a_word_that_megatron_has_both_ways() -> None:
    kinds = ["--cp-comm-type", "p2p", "allgather", "p2p", "a2a"]
    _, config = load(["debug", *kinds, "--moe-token-dispatcher-type", "allgather"], Options)
    assert config.parallel.cp_comm_type == ("p2p", "all_gather", "p2p", "a2a")
    assert config.parallel.moe_token_dispatcher_type == "allgather"


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_changed_section_is_one_that_is_made_so(section: type) -> None:
    """`Config.with_values` makes it from the settings of the old one, and calls nothing."""
    members = {name: member for kind in section.__mro__ for name, member in vars(kind).items()}
    assert "__post_init__" not in members
    assert {*members.get("__slots__", ())} <= {"_hash"}, "with_values would leave a setting out"
    assert not any(isinstance(member, cached_property) for member in members.values())


def test_a_recipe_may_come_through_a_pipe() -> None:
    """As a shell's `fivefold train <(fivefold plan MODEL --emit fivefold)` gives it."""
    reads, writes = os.pipe()
    os.write(writes, b'[model]\npreset = "debug-llama"\n[training]\nseq_length = 48\n')
    os.close(writes)
    try:
        assert read_config(f"/dev/fd/{reads}").training.seq_length == 48
    finally:
        os.close(reads)
