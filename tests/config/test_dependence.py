"""No setting is accepted and ignored; flags take recipes apart without contradicting them."""

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from math import prod
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import SECTION_SETTINGS, SECTIONS, SETTINGS, Config
from fivefold.config.flags import ALIASES
from fivefold.config.rules.dependence import orphans, without_orphans
from fivefold.config.rules.dependents import DEPENDENTS
from fivefold.config.rules.orphan import Dependents
from fivefold.config.settings import Setting, settings_of
from fivefold.config.sources import read_config, recipe_names, to_toml
from fivefold.counts.derived import describe
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.optim.schedule import learning_rate
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from tests.model.models import batch_of


class Exempt(NamedTuple):
    """Why a setting may change nothing alone, and settings beside which it does."""

    reason: str
    beside: dict[str, Any]


NOWHERE: dict[str, Any] = {}
EXEMPT = {
    "max_position_embeddings": Exempt(
        "RoPE needs no longest sequence; learned positions, samples and other trainers do",
        {"position_embedding_type": "learned_absolute"},
    ),
    "pipeline_schedule": Exempt(
        "a single rank has no bubble, and runs most schedules in one order",
        {"pipeline_model_parallel_size": 2},
    ),
    "overlap_grad_reduce": Exempt(
        "a model that fits one bucket is reduced after its backward", {"ddp_bucket_size": 1000}
    ),
    "overlap_param_gather": Exempt(
        "on by default, and off where no parameters are sharded, of which there is nothing to hide",
        {"data_parallel_sharding_strategy": "optim", "hidden_size": 1024},
    ),
    **dict.fromkeys(
        (
            "bias_swiglu_fusion",
            "bias_gelu_fusion",
            "rope_fusion",
            "bias_dropout_fusion",
        ),
        Exempt("the same numbers by kernels of a GPU: tests/model/test_fusions.py", NOWHERE),
    ),
    "use_precision_aware_optimizer": Exempt(
        "it lets exp_avg_dtype and exp_avg_sq_dtype choose types, and chooses none itself", NOWHERE
    ),
    "check_for_nan_in_loss_and_grad": Exempt(
        "seen only where a loss is not finite: tests/train/test_loop.py", NOWHERE
    ),
    "distributed_timeout_minutes": Exempt(
        "seen only where a rank does not answer: tests/train", NOWHERE
    ),
    "watchdog_timeout_seconds": Exempt(
        "seen only where a rank does not go on: tests/train/test_watchdog.py", NOWHERE
    ),
    **dict.fromkeys(
        ("check_for_spiky_loss", "bad_step_action"),
        Exempt("seen only where a step is bad: tests/train/test_bad_steps.py", NOWHERE),
    ),
    "device_memory_limit": Exempt(
        "seen only where more is held: tests/audit/test_holdings.py", NOWHERE
    ),
    "numa_binding": Exempt("the same numbers: tests/train/test_numa.py", NOWHERE),
    "manual_gc": Exempt("the same numbers: tests/train/test_garbage.py", NOWHERE),
    "deterministic_mode": Exempt(
        "the same bits, which CPUs compute anyway: tests/train/test_cuda_environment.py", NOWHERE
    ),
    "keep_latest_k": Exempt(
        "a new run writes one checkpoint; a continued one has more", {"save_interval": 1}
    ),
    "non_persistent_save_interval": Exempt(
        "removed when a run ends; tests/train/test_local.py", NOWHERE
    ),
    "async_save": Exempt("the same files, written while training goes on", NOWHERE),
}

# Values to try where twice the default, the other choices or the other switch would not do.
VALUES: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (0.01,),  # below what a fresh model computes
    "num_attention_heads": (2,),
    "num_query_groups": (4,),
    "kv_channels": (32,),
    "make_vocab_size_divisible_by": (1024,),
    "moe_layer_freq": ("2",),
    "moe_router_load_balancing_type": (("aux_loss",),),
    "moe_aux_loss_coeff": ((0.1,),),
    "window_attn_skip_freq": ("2",),
    "no_rope_freq": ("2",),
    "linear_attention_freq": ("2", "[0,1,0,1]"),
    "hybrid_override_pattern": ("M-*M", "MMMM"),
    "mamba_num_heads": (4,),
    "mtp_hybrid_override_pattern": ("*-",),
    "attention_chunk_size": (8,),
    "rotary_base_local": (100.0,),
    "num_query_groups_local": (2,),
    "kv_channels_local": (32,),
    "v_channels": (24,),
    "value_multiplier": (0.7,),
    "layer_scalar": (0.6,),
    "clip_qkv": (0.02,),
    "position_embedding_offset": (2,),
    "softmax_scale": (0.3,),
    "latent_norm_epsilon": (0.1,),
    "moe_router_norm_epsilon": (0.1,),
    "attn_logit_softcapping": (0.7,),
    "final_logit_softcapping": (0.7,),
    "rotary_seq_len_interpolation_factor": (2.5,),
    "longrope_short_factor": ((1.5, 2.0),),
    "longrope_long_factor": ((1.5, 2.0),),
    "longrope_attention_factor": (1.5,),
    "moe_expert_rank_capacity_factor": (1.5,),
    "moe_deepep_num_sms": (24,),
    "num_experts": (4,),
    "rope_high_freq_factor": (8.0,),
    "window_size": (8,),
    "unmodelled": (("sinks",),),
    "pipeline_model_parallel_layout": ("auto", "Ett|ttL"),
    "hierarchical_context_parallel_sizes": ((1, 1),),
    "cp_comm_type": (("a2a",), ("all_gather",), ("a2a+p2p",)),
    "data_parallel_shard_size": (2,),
    "ddp_bucket_size": (1000,),
    "zero_hpz_partition_size": (2,),
    "zero_qgz_partition_size": (2,),
    "recompute_modules": (("mlp",),),
    "recompute_num_layers": ((2,), (1, 2)),
    "offload_modules": (("core_attn",),),
    "offload_tensors": (("dispatched_input",), ("pre_mlp_layernorm_output",)),
    "optimizer_offload_fraction": (0.5,),
    "activation_offload_fraction": (0.5,),
    "optimizer_offload_path": ("/tmp",),
    "device_memory_limit": ("1GiB",),
    "param_offload_path": ("/tmp",),
    "global_batch_size": (16,),
    "seq_length": (32,),
    "hidden_dropout": (0.1,),
    "embedding_dropout": (0.1,),
    "attention_dropout": (0.1,),
    "label_smoothing": (0.1,),
    "z_loss_coeff": (1e-3,),
    "data_path": (("other.jsonl",), ("mock",)),
    "valid_data_path": (("other=other.jsonl",),),
    "tokenizer_model": ("tokenizer.json",),
    "tokenizer_vocab_size": (300,),
    "data_cache_path": ("elsewhere",),
    "split": ("1",),
    "text_key": ("title",),
    "fim_split_sample": ("<file_sep>",),
    "fim_fragment_rate": (0.3,),
    "fim_no_prefix": ("# ",),
    "exit_duration_in_mins": (1e-6,),
    "iterations_to_skip": ((1,),),
    "embedding_init_method_std": (1.0,),
    "lr_decay_iters": (5,),
    "lr_decay_samples": (50,),
    "lr_warmup_samples": (20,),
    "lr_wsd_decay_samples": (20,),
    "rampup_batch_size": ((2, 2, 30),),
    "train_samples": (96,),
    "adam_beta1": (0.5,),
    "adam_beta2": (0.5,),
    "adam_eps": (1e-3,),
    "min_lr": (1e-4,),
    "decoupled_lr": (1e-4,),
    "decoupled_min_lr": (1e-5,),
    "start_weight_decay": (0.01,),
    "end_weight_decay": (0.2,),
    "lr_warmup_init": (1e-4,),
    "save": ("saved",),
    "load": ("donor",),
    "wandb_project": ("name",),
    "profile_ranks": ((1,),),
}


def values_of(setting: Setting) -> tuple[Any, ...]:
    """What to change a setting to."""
    if setting.name in VALUES:
        return VALUES[setting.name]
    default = getattr(BASE_SECTIONS[setting.name], setting.name)
    if setting.choices:
        return tuple(choice for choice in setting.choices if choice != default)
    if setting.kind is bool:
        return (not default,)
    return (2 * default if default else 2,)


BASE = read_config("debug", lr_warmup_iters=0)
BASE_SECTIONS = {
    s.name: getattr(BASE, name) for name, cls in SECTIONS.items() for s in settings_of(cls)
}
CASES = [(s.name, value) for s in SETTINGS.values() for value in values_of(s)]


def numbers(layout: Layout) -> Iterator[Any]:
    """What follows from a layout on a cluster, without the settings themselves; what takes longest
    comes last."""
    cluster = load_cluster("H100", layout.grid.world_size)
    training, optimizer = layout.config.training, layout.config.optimizer
    yield layout.grid
    yield [learning_rate(n, optimizer, training) for n in range(training.num_steps + 1)]
    yield predict(layout, cluster).step_time
    yield [
        (rank.peak, rank.device_total if hasattr(rank, "device_total") else 0)
        for rank in peak_memory(layout, cluster).ranks
    ]
    yield [row for row in describe(layout) if row[0] != "schedule"]
    yield layout.split
    yield layout.order().program().ranks


@cache
def base_numbers(world: int, beside: tuple[tuple[str, Any], ...] = ()) -> list[Any]:
    return [*numbers(check(BASE.with_values(**dict(beside)), world))]


def checked(config: Config, world: int, name: str) -> Layout | None:
    """None: a configuration is refused, with a line that names the setting or its value."""
    try:
        return check(config, world)
    except ConfigError as error:
        names = [name, SETTINGS[name].flag, *(f"{a}=" for a, of in ALIASES.items() if of == name)]
        value = getattr(dict(config.sections())[section_of(name)], name)
        names += [value] if isinstance(value, str) else []
        names += value if name == "unmodelled" else []
        assert any(word in str(error) for word in names), error
        return None


def section_of(name: str) -> str:
    return next(s for s, settings in SECTION_SETTINGS.items() if SETTINGS[name] in settings)


def shows(name: str, value: Any, **beside: Any) -> bool:
    """Whether a setting is refused by name, changes a number on one rank or on four, or is one of
    the model's and changes what that computes."""
    config = BASE.with_values(**beside, **{name: value})
    for world in (4,) if "pipeline_model_parallel_size" in beside else (1, 4):
        layout = checked(config, world, name)
        if layout is None or any(map(ne, numbers(layout), base_numbers(world, (*beside.items(),)))):
            return True
    return config.model != BASE.model and not torch.equal(logits(config), logits(BASE))


def logits(config: Config) -> torch.Tensor:
    """What a fresh model computes for one text."""
    stage = Stage(config.model, training=config.training).eval()
    initialise(stage, seed=1)
    with torch.no_grad():
        return stage.logits(batch_of(config.model, [[config.training.seq_length]]))


def test_a_model_computes_the_same_again() -> None:
    """Or each of its settings would seem to have an effect."""
    assert torch.equal(logits(BASE), logits(BASE))


DOCUMENTS = "".join(
    f'{{"text": "Document {n} says {n * n}, and a little more.", "title": "{n} is the title"}}\n'
    for n in range(200)
)
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss", "max_attention_logit")


class Runs:
    """Trains the smallest recipe, each time in a folder of its own, in this process; they share the
    texts, and what these are tokenised to."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        (root / "home").mkdir()
        (root / "text.jsonl").write_text(DOCUMENTS)
        (root / "other.jsonl").write_text(DOCUMENTS.replace("says", "has"))
        self.donor, _ = self.train({"seed": 7, "tokenizer_vocab_size": 300})

    def train(self, values: dict[str, Any]) -> tuple[Path, list[Any]]:
        """The folder and what can be seen of the run: numbers, files, lines that tell steps."""
        self.count += 1
        folder = self.root / str(self.count)
        folder.mkdir()
        for name in ("text.jsonl", "other.jsonl"):
            (folder / name).symlink_to(self.root / name)
        if self.count > 1:
            (folder / "donor").symlink_to(self.donor / "runs" / "latest")
            (folder / "tokenizer.json").symlink_to(folder / "donor" / "tokenizer.json")
        small = {"num_layers": 2, "global_batch_size": 4, "micro_batch_size": 2}
        small |= {"train_iters": 4, "lr_warmup_iters": 0}
        words = {"data_path": ("text.jsonl",)} | small | values
        flags = " ".join(SETTINGS[name].typed(value) for name, value in words.items())
        before = Path.cwd(), os.environ["HOME"]
        os.chdir(folder)
        os.environ["HOME"] = str(self.root / "home")
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(["train", "debug", *flags.split()])
        finally:
            os.chdir(before[0])
            os.environ["HOME"] = before[1]
        return folder, [status, err.getvalue(), *_seen(folder, out.getvalue())]


def _seen(folder: Path, out: str) -> Iterator[Any]:
    metrics = [path for path in folder.rglob("metrics.jsonl") if "donor" not in path.parts]
    for path in metrics:
        for line in path.read_text().splitlines():
            yield {k: v for k, v in json.loads(line).items() if k in NUMBERS or "loss" in k}
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    yield sorted({re.sub(r"debug-[\d-]+|[0-9a-f]{32}", "NAME", name) for name in names})
    yield [line.split()[0] for line in out.splitlines() if re.match(r" *\d+/\d+ ", line)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def plain_run(runs: Runs) -> list[Any]:
    found = runs.train({})[1]
    assert found[0] == 0, found
    assert runs.train({})[1] == found  # or every setting would seem to have an effect
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_alone_has_an_effect_or_is_refused(
    name: str, request: pytest.FixtureRequest
) -> None:
    """On numbers that follow from the layout, on a run of four steps, or beside another setting."""
    for value in values_of(SETTINGS[name]):
        if shows(name, value):
            continue
        beside = EXEMPT[name].beside if name in EXEMPT else {}
        if name in EXEMPT and (beside is NOWHERE or shows(name, value, **beside)):
            continue
        runs, plain = (request.getfixturevalue(each) for each in ("runs", "plain_run"))
        status, said, *seen = runs.train(beside | {name: value})[1]
        if status:
            assert name.partition("_")[0] in said, said
        else:
            usual = runs.train(beside)[1] if beside else plain
            assert seen != usual[2:], f"{name} = {value} changes nothing"


DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_distributed_optimizer_instances": "dp-replicate",
    "data_parallel_shard_size": "dp-shard",
}
WORLD = (*list(DEGREES)[:3], *list(DEGREES)[-2:])


def preview(*words: str) -> tuple[int, str]:
    """Exit status and what is said beside the preview of a run."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["train", *words, "--dry-run"])
    return status, err.getvalue()


def ranks(config: Config, *but: str) -> int:
    """The ranks of a recipe's degrees, without some of them; an inferred one counts as 2."""
    sizes = {name: config.value(name) for name in WORLD if name not in but}
    return prod(2 if size == -1 else size for size in sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("recipe", recipe_names())
def test_any_degree_of_a_recipe_can_be_one(recipe: str, degree: str) -> None:
    config = read_config(recipe)
    words = [recipe, f"--{DEGREES[degree]}", "1", "--nproc", str(ranks(config, degree))]
    status, said = preview(*words)
    assert status == 0, said
    left_out = list(orphans(config.with_values(**{degree: 1})))
    assert said.splitlines() == [
        f"note: {orphan.shown} of the recipe is left out: {orphan.why}" for orphan in left_out
    ]


PARTS: dict[str, tuple[dict[str, Any], ...]] = {
    "tensor_model_parallel_size": ({"sequence_parallel": True},),
    "pipeline_model_parallel_size": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"pipeline_model_parallel_layout": "Et|tttL"},
        {"pipeline_model_parallel_layout": "auto"},
        {"decoder_first_pipeline_num_layers": 1},
        {"decoder_last_pipeline_num_layers": 1},
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        {"pipeline_schedule": "zb_v", "pipeline_model_parallel_layout": "v:Et|t|t|tL"},
        {"pipeline_schedule": "synthesised", "pipeline_in_flight_limit": 3.0},
        {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2},
        {
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 4,
        },
        {"pipeline_schedule": "dualpipe"},
    ),
    "context_parallel_size": (
        {"cp_comm_type": ("a2a",)},
        {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 1)},
    ),
}


@pytest.mark.parametrize(
    ("degree", "dependents"), [(d, part) for d, parts in PARTS.items() for part in parts], ids=str
)
def test_what_hangs_on_a_degree_goes_with_it_unless_it_was_given_by_hand(
    degree: str, dependents: dict[str, Any], tmp_path: Path
) -> None:
    flag = f"--{DEGREES[degree]}"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(BASE.with_values(**{degree: 2}, **dependents), changes_only=True))
    assert preview(str(recipe), "--nproc", "2") == (0, "")
    status, said = preview(str(recipe), "--nproc", "1", flag, "1")
    assert status == 0, said
    assert {line.split()[1] for line in said.splitlines()} == set(dependents)
    by_hand = [SETTINGS[name].typed(value) for name, value in dependents.items()]
    # A schedule or slices of a single rank have an effect.
    if not {"pipeline_schedule", "num_sequence_slices"} & set(dependents):
        status, said = preview("debug", "--nproc", "1", flag, "1", *shlex.split(" ".join(by_hand)))
        assert status == 2
        assert any(name in said or SETTINGS[name].flag in said for name in dependents), said


WINDOWS: dict[str, Any] = {"window_size": 8, "window_attn_skip_freq": "[0,1,0,1]"}
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"window_attn_skip_freq": "2"},
    {"window_size": 8},
    {"window_size": 8, "window_attn_skip_freq": "2"},
    WINDOWS,
    WINDOWS
    | {"num_query_groups_local": 2, "kv_channels_local": 16, "softmax_type_local": "vanilla"},
    {"no_rope_freq": "2"},
    {"no_rope_freq": "3"},
)
"""What may have to be set for a setting to hang on another one: the first that does."""


def test_other_settings_of_a_recipe_go_with_what_they_are_for() -> None:
    """A flag that turns a part off leaves out what the recipe says of it, and only that."""
    steps = BASE.with_values(train_iters=SETTINGS["train_iters"].default)
    for of in DEPENDENTS:
        if of.on in WORLD or of.on == "tokenizer_model":
            continue
        name = of.names[0]
        base = steps.with_values(train_samples=64) if of.on == "lr_warmup_samples" else steps
        given = {name: values_of(SETTINGS[name])[0]}
        living, alive, dead = two_values(of, base.with_values(**given))
        config = living.with_values(**{of.on: dead})
        without = config.with_values(**{name: SETTINGS[name].default})
        also, others = without_orphans(without, {of.on})
        kept, left_out = without_orphans(config, {of.on})
        assert {o.name for o in left_out} == {name, *(o.name for o in others)}
        assert kept == also
        assert name not in [o.name for o in without_orphans(config, {of.on, name})[1]]
        assert without_orphans(config, set()) == (config, [])
        left_out = without_orphans(living.with_values(**{of.on: alive}), {of.on})[1]
        assert name not in [orphan.name for orphan in left_out]


def two_values(of: Dependents, config: Config) -> tuple[Config, Any, Any]:
    """A configuration, a value of the setting that others hang on with which they live in it, and
    one without."""
    setting = SETTINGS[of.on]
    tried = [*values_of(setting), setting.default, *setting.choices, 1, 0, True, None, 4]
    if setting.kind is str:
        tried = [value for value in tried if not isinstance(value, int)]
    fitting = [v for v in tried if v is not None or setting.optional]
    for beside in BESIDE:
        base = config.with_values(**beside)
        living = [bool(of.alive(base.with_values(**{of.on: value}))) for value in fitting]
        if len({*living}) == 2:
            return base, fitting[living.index(True)], fitting[living.index(False)]
    raise AssertionError(f"{of.names} hang on no value of {of.on}")


def test_exemptions_are_of_settings_that_need_one() -> None:
    assert set(EXEMPT) <= set(SETTINGS)
    for name in EXEMPT:
        assert not all(shows(name, value) for value in values_of(SETTINGS[name])), name
