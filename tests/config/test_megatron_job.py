"""Jobs of Megatron-LM in settings: nothing is read and ignored, and what was exported comes back.

`benchmarks.check_exports` holds the same against what Megatron-LM itself logs.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.export_cases import CHANGES, changed, layouts
from benchmarks.export_combinations import combinations
from benchmarks.translations import command_of, differing
from fivefold.check import check
from fivefold.config.megatron_job.arguments import job_of, read_job
from fivefold.config.megatron_job.command import ScriptEnvironment
from fivefold.config.megatron_job.release import Argument, known
from fivefold.config.megatron_job.settings import Translation, translate
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.tell.export.targets import export

DENSE = (
    "torchrun --nproc_per_node=8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 32 --train-iters 10 --lr 0.001 --vocab-size 1000 --mock-data "
)
EXPERTS = (
    "--num-experts 8 --moe-aux-loss-coeff 0.01 --multi-latent-attention --qk-layernorm --bf16 "
    "--fp8-format hybrid --first-last-layers-bf16 --optimizer muon --mtp-num-layers 1 "
    "--lr-decay-style WSD --lr-wsd-decay-iters 2 --profile --position-embedding-type rope "
    "--use-rope-scaling "
    "--pipeline-model-parallel-size 2 --context-parallel-size 2 --swiglu "
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --manual-gc "
    "--fine-grained-activation-offloading --offload-modules core_attn --optimizer-cpu-offload "
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --cross-entropy-loss-fusion "
    "--eval-interval 5 --window-size 16,0 --moe-token-dispatcher-type flex "
    "--use-distributed-optimizer --group-query-attention --moe-enable-deepep "
    "--experimental-attention-variant dsa "
)
OTHERS = (
    "--fp16 --train-samples 320 --tensor-model-parallel-size 2 --sequence-parallel "
    "--recompute-granularity selective --context-parallel-size 2 --use-torch-fsdp2 "
    "--pipeline-model-parallel-size 2 --data-path a b --tokenizer-type HuggingFaceTokenizer "
    "--use-rotary-position-embeddings --cuda-graph-impl local --fim-data --qk-clip "
    "--fim-split-sample '<part>' --fim-fragment-rate 0.5 "
)
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim "
DATA = DENSE.replace("--mock-data ", "")
JOBS = (DENSE, DENSE + EXPERTS, DATA + OTHERS, DENSE + SHARDED)
INERT = {
    *("start_weight_decay", "end_weight_decay"),  # of a weight decay that is constant
    "accumulate_allreduce_grads_in_fp32",  # as they always are
    "finetune",  # weights alone are loaded, however
    "fim_pad_token",  # no sample is padded
}


def laid_out(part: int, parts: int) -> Iterator[tuple[str, Layout]]:
    """One part of the layouts, with what each is made from."""
    yield from [*layouts()][part::parts]
    for name in [*CHANGES][part::parts]:
        yield from ((name, layout) for layout in changed(name))
    yield from combinations(200 // parts, seed=part)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 10))]
)
def test_what_was_exported_comes_back(part: int) -> None:
    for name, layout in laid_out(part, 10):
        found = export(layout, "megatron")
        assert not differing(command_of(found.text, layout), found, layout), name


def test_a_value_that_is_lost_on_the_way_shows() -> None:
    layout = next(layout for _, layout in layouts())
    found = export(layout, "megatron")
    command = command_of(found.text, layout) + " --weight-decay 0.3 --rotary-base 7 --seed 5"
    wrong = " ".join(differing(command, found, layout))
    assert "weight_decay" in wrong and "rotary_base" in wrong and "seed" in wrong


def other_value(argument: Argument, value: Any) -> Any:
    """One of the same kind."""
    if argument.action != "Store":
        return not value
    if argument.kind in ("int", "float"):
        first = value[0] if isinstance(value, list) and value else value
        other = (first if isinstance(first, int | float) else 6) + 1
        changed: Any = int(other) if argument.kind == "int" else other * 0.75
    else:
        changed = "2" if value is None else "other"
    return [changed] if argument.nargs in ("*", "+") else changed


def outcome(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """Settings, and what was named; None: refused."""
    try:
        found = translate(job_of(given))
        read_config(**found.values)
    except ConfigError:
        return None
    return found.values, found.lost + found.harmless


def test_no_argument_is_read_and_ignored() -> None:
    """One that is not at its default changes a setting, is named, or is refused, in some job."""
    jobs = [read_job(job).given | {"world_size": 16} for job in JOBS]
    usual = [outcome(job) for job in jobs]
    assert None not in usual
    ignored = [
        argument.name
        for argument in known().arguments
        if all(
            outcome(job | {argument.name: other_value(argument, value)}) == before
            for job, before in zip(jobs, usual, strict=True)
            for value in [job.get(argument.name, known().defaults[argument.name])]
        )
    ]
    assert set(ignored) <= set(INERT), ignored


def logged(given: dict[str, Any]) -> str:
    """What Megatron-LM prints of its arguments."""
    everything = {**known().defaults, **given}
    rows = (f"  {name} {'.' * (48 - len(name))} {value}" for name, value in everything.items())
    lines = [
        "using world size: 16, data-parallel size: 8",
        "------------------------ arguments ------------------------",
        *sorted(rows, key=str.lower),
        "-------------------- end of arguments ---------------------",
        " > padded vocab (size: 1000) with 24 dummy tokens (new size: 1024)",
    ]
    return "\n".join(f"[rank0]: {line}" for line in lines)


@pytest.mark.parametrize("command", JOBS[:2])
def test_a_log_says_what_its_command_line_does(command: str) -> None:
    job = read_job(command)
    told = read_job(logged({**job.given, "world_size": 16, "rank": 0}))
    assert translate(told) == translate(job) and told.vocabulary == 1000


def found(more: str = "", **values: Any) -> Translation:
    return translate(read_job(DENSE + more), **values)


def test_defaults_are_those_of_megatron() -> None:
    model = read_config(**found().values).model
    assert (model.normalization, model.activation_func) == ("LayerNorm", "gelu_tanh")
    assert (model.hidden_dropout, model.add_bias_linear) == (0.1, True)
    assert model.position_embedding_type == "learned_absolute"
    assert not model.untie_embeddings_and_output_weights
    squared = read_config(**found("--squared-relu --quick-geglu").values).model
    assert (squared.activation_func, squared.gated_linear_unit) == ("squared_relu", False)
    assert found().ranks == 16
    both = found("--use-rotary-position-embeddings --qk-layernorm --qk-l2-norm").values
    assert (both["qk_l2_norm"], both["qk_layernorm"]) == (True, False)
    assert found("--swiglu").values["ffn_hidden_size"] == 128  # two thirds of 256, in 64s
    assert found("--lr-warmup-fraction 0.2").values["lr_warmup_iters"] == 2


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model m", "m/tokenizer.json"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model m.model", "m.model"),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m.model", "m.model"),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model m.model", None),  # adds tokens
        ("--vocab-file a/gpt2-vocab.json --merge-file a/gpt2-merges.txt", "a/gpt2-vocab.json"),
        ("--vocab-file a/gpt2-vocab.json --merge-file b/gpt2-merges.txt", None),
        ("--vocab-file vocab.txt --merge-file merges.txt", None),
        ("--vocab-file vocab.txt", None),
        ("", None),
    ],
)
def test_tokenizers_are_the_same_or_named_as_lost(flags: str, file: str | None) -> None:
    own = "--tokenizer-type" in flags
    for kind in ("",) if own else ("--tokenizer-type GPT2BPETokenizer ", ""):  # the default
        job = found(kind + flags)
        assert job.values.get("tokenizer_model") == file
        assert any("tokenizer" in lost for lost in job.lost) == (file is None) or not kind + flags


@pytest.mark.parametrize(
    ("tp", "tokenizer", "padded"), [(1, "", 1024), (8, "", 1024), (2, "NullTokenizer", 1024)]
)
def test_vocabularies_are_padded_as_there(tp: int, tokenizer: str, padded: int) -> None:
    kind = f"--tokenizer-type {tokenizer}" if tokenizer else ""
    config = read_config(**found(f"--tensor-model-parallel-size {tp} {kind}").values)
    assert config.model.padded_vocab_size == padded
    assert config.model.vocab_size == 1000 + bool(tokenizer)
    wide = read_config(**found("--tensor-model-parallel-size 16 --padded-vocab-size 4096").values)
    assert wide.model.padded_vocab_size == 4096


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello world", "neither a command line"),
        (
            "accelerate launch --config_file a.yaml t.py",
            r"neither(.|\n)*works: fivefold translate a.yaml",
        ),
        ("deepspeed --num_gpus $N t.py --deepspeed c.json", r"neither(.|\n)*translate c.json"),
        (DENSE + "--num-layers $LAYERS", "only its caller knows \\$LAYERS .num_layers. of the"),
        (DENSE + "--num-layers four", "Megatron-LM would refuse"),
        (DENSE + "'--lr", "no command that a shell reads"),
        (DENSE.replace("--num-layers 4", ""), "does not say num_layers"),
        (DENSE.replace("--vocab-size 1000", ""), "how many tokens its tokenizer has"),
        (DENSE + "--qk-l2-norm --no-rope-freq 4", "layers without RoPE, too, which no model"),
        (DENSE + "--apply-residual-connection-post-layernorm", "= True: no model here has that"),
        (DENSE + "--position-embedding-type relative", "position_embedding_type cannot be"),
        ("---- arguments ----\n  a ...... 1\n---- end of arguments ----", "has no num_layers"),
    ],
)
def test_what_is_no_job_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(read_job(text))


def test_what_changes_nothing_is_told_apart() -> None:
    usual, more = found(""), found("--no-clone-scatter-output-in-embedding")
    assert more.lost == usual.lost
    assert {*more.harmless} - {*usual.harmless} == {"clone_scatter_output_in_embedding"}


def test_what_is_made_again_is_not_offloaded_besides() -> None:
    """It copies there what nobody reads again; and what inputs make again goes with moving them."""
    found = translate(
        read_job(
            DENSE + "--fine-grained-activation-offloading --recompute-granularity selective "
            "--recompute-modules layernorm mlp --offload-modules attn_norm qkv_linear mlp_norm"
        )
    )
    assert [line for line in found.lost if "offload" in line] == [
        "offload_modules qkv_linear: recompute_modules layernorm recomputes what they would move"
    ]
    assert list(found.values["offload_modules"]) == ["attn_norm", "mlp_norm"]
    check(read_config(**found.values), 16)
    alone = translate(
        read_job(
            DENSE + "--fine-grained-activation-offloading --recompute-granularity selective "
            "--recompute-modules layernorm --offload-modules qkv_linear"
        )
    )
    assert "fine_grained_activation_offloading" not in alone.values


def test_neighbouring_rotary_features_are_read() -> None:
    turned = translate(read_job(DENSE + "--position-embedding-type rope --rotary-interleaved"))
    assert turned.values["rotary_interleaved"] is True


def test_flags_of_other_releases_are_named() -> None:
    (lost, *_) = [
        line for line in found("--newest-thing 3 4 --log-throughput").lost if "new" in line
    ]
    assert lost.startswith("--newest-thing 3 4: no argument of Megatron-LM 0.16")


@pytest.mark.parametrize(
    ("topk", "weighs"), [(1, ("sigmoid", False, None)), (2, ("softmax", True, None))]
)
def test_sinkhorn_weighs_as_there(topk: int, weighs: tuple[str, bool, float | None]) -> None:
    """Its router's code looks at no setting of the weights then; an export says so."""
    values = found(
        f"--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk {topk} "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function softmax"
    ).values
    names = ("score_function", "pre_softmax", "topk_scaling_factor")
    assert tuple(values[f"moe_router_{name}"] for name in names) == weighs


ODD = (None, "x", -1, 0, [1], ["a", "b"], 1e9, "", True, False, "1", 2.5, "[1, 2]", {"a": 1})


@pytest.mark.parametrize("seed", range(2))
def test_values_of_any_kind_are_read_or_refused(seed: int) -> None:
    """As logs and checkpoints of other programs may have them."""
    draw, names = Random(seed), [argument.name for argument in known().arguments]
    for _ in range(100):
        values = {draw.choice(names): draw.choice(ODD) for _ in range(draw.choice((1, 1, 2, 4)))}
        with suppress(ConfigError):
            translated = translate(job_of(read_job(draw.choice(JOBS)).given | values))
            read_config(**translated.values)


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
GPUS=4; SEQ=${SEQ:-128}
ARGS=(--num-layers 4 --hidden-size 64 # small
  --num-attention-heads 8 --seq-length $SEQ --max-position-embeddings $SEQ)
if [ "$TP" ]; then ARGS+=(--tensor-model-parallel-size $TP); fi
export CMD="pretrain_gpt.py ${ARGS[@]} --micro-batch-size 2 --global-batch-size $((GPUS * 16)) \\
  --train-iters 10 --lr 0.001 --mock-data --save $OUT --tensorboard-dir"
srun bash -c "torchrun --nproc_per_node $GPUS --nnodes $SLURM_NNODES $CMD --vocab-size $1 $MORE"
"""


def test_a_script_is_read_as_its_command() -> None:
    job = read_job(SCRIPT, ScriptEnvironment({"TP": "2"}, ["1000"]))
    found = translate(job)
    assert found.ranks == 8
    assert found.values["tensor_model_parallel_size"] == 2
    assert found.values["global_batch_size"] == 64
    assert found.values["vocab_size"] == 1000
    told = " ".join(found.lost)
    assert "save = $OUT" in told and "tensorboard_dir = nothing" in told
    with pytest.raises(ConfigError, match=r"knows \$1 \(vocab_size\).*\n.*script-arguments"):
        read_job(SCRIPT)


def test_sizes_in_a_file_beside_the_script_are_found_or_the_file_is_named(tmp_path: Path) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 128"
    job = tmp_path / "job.sh"
    text = """
    HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)"
    source "$HERE/sizes.sh"
    torchrun pretrain_gpt.py $SIZES --seq-length 128 --micro-batch-size 2 --global-batch-size 8 \\
      --train-iters 10 --lr 1e-3 --data-path $HERE/corpus --vocab-size $(echo "4 * 250" | bc)
    """
    with pytest.raises(ConfigError, match=rf"num_layers(.|\n)*source {tmp_path}/sizes.sh"):
        translate(read_job(text, ScriptEnvironment(script=job)))
    (tmp_path / "sizes.sh").write_text(f'SIZES="{sizes}"\n')
    values = translate(read_job(text, ScriptEnvironment(script=job))).values
    told = {"num_layers": 4, "vocab_size": 1000, "data_path": (f"{tmp_path}/corpus",)}
    assert {name: values[name] for name in told} == told


def test_a_file_of_arguments_is_read_as_its_command() -> None:
    lines = """
    MODEL_ARGS:
      --num-layers: 4
      --hidden-size: ${H}
      --num-attention-heads: 8
      --seq-length: 128
      --max-position-embeddings: 128
      --micro-batch-size: 2
      --rampup-batch-size: 8 8 80
      --recompute-granularity: selective
      --recompute-modules: [moe_act mlp]
      --global-batch-size: 32
      --train-iters: 10
      --lr: 1e-3
      --bf16: true
      --swiglu: false
      --moe-layer-freq: ([0]*1+[1]*3)
      --num-experts: 8
      --vocab-size: 1000
      --data-path: $DATA
    """
    text = "\n".join(line[4:] for line in lines.splitlines())
    found = translate(read_job(text, ScriptEnvironment({"H": "64"})))
    told = {"hidden_size": 64, "precision": "bf16", "rampup_batch_size": (8, 8, 80)}
    told |= {"recompute_modules": ("moe_act", "mlp"), "moe_layer_freq": "([0]*1+[1]*3)"}
    assert {name: found.values[name] for name in told} == told
    assert not found.values["gated_linear_unit"]
    assert any("data_path = $DATA" in line for line in found.lost)
    with pytest.raises(ConfigError, match=r"\$H \(hidden_size\)"):
        read_job(text)


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (
            "--checkpoint-activations",
            {"recompute_granularity": "full", "recompute_num_layers": (1,)},
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            {"recompute_method": "uniform", "recompute_num_layers": (2,)},
        ),
        ("--activations-checkpoint-method block", {"recompute_method": "block"}),
        ("--zero-stage 1", {"data_parallel_sharding_strategy": "optim"}),
        ("--zero-stage=3", {"data_parallel_sharding_strategy": "optim_grads_params"}),
        ("--num-key-value-heads 2", {"num_query_groups": 2}),
        ("--attention-head-type multiquery", {"num_query_groups": 1}),
        ("--ds-sequence-parallel-size 2", {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}),
        ("--glu-activation swiglu", {"activation_func": "silu", "ffn_hidden_size": 256}),
        ("--normalization rmsnorm --layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--deepspeed --num-experts 1", {}),
        (
            "--train-samples 400 --train-tokens 25600 --lr-decay-tokens 12800",
            {"train_samples": 200, "lr_decay_samples": 100},
        ),
    ],
)
def test_flags_of_relatives_are_those_of_the_release(more: str, values: dict[str, Any]) -> None:
    job = DENSE.replace("--train-iters 10", "") if "tokens" in more else DENSE
    found = translate(read_job(job + more))
    assert {name: found.values[name] for name in values} == values
    assert "num_experts" not in found.values
    named = [line for line in found.lost if more.split()[0] in line]
    assert not named


def test_layers_that_keep_bf16_are_read_where_others_have_8_bits() -> None:
    names = "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"
    asked = DENSE + "--bf16 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2 "
    narrow = translate(read_job(asked + "--fp8-format hybrid --fp8-recipe tensorwise"))
    assert [narrow.values[name] for name in names] == [True, 1, 2]
    wide = translate(read_job(asked))
    none = asked + "--fp8-format e4m3 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0"
    for job in (wide, translate(read_job(none))):
        assert not {*names} & {*job.values} and "bf16" not in " ".join(job.lost)


LOCAL = "--non-persistent-save-interval 20 --non-persistent-local-ckpt-dir /dev/shm/states"


def test_states_in_hosts_memory_are_carried_over() -> None:
    """As Megatron-LM's local checkpoints; those on a file system of all are named."""
    found = translate(read_job(f"{DENSE} {LOCAL} --non-persistent-ckpt-type local"))
    assert found.values["non_persistent_save_interval"] == 20
    assert found.values["non_persistent_local_ckpt_dir"] == "/dev/shm/states"
    assert "replication_jump" not in found.values
    twice = f"{LOCAL} --non-persistent-ckpt-type local --replication --replication-jump 8"
    assert translate(read_job(f"{DENSE} {twice}")).values["replication_jump"] == 8
    of_all = translate(read_job(f"{DENSE} {LOCAL} --non-persistent-ckpt-type global"))
    assert "non_persistent_save_interval" not in of_all.values
    assert "non_persistent_ckpt_type" in of_all.harmless


def test_an_embedding_in_fp32_is_named_with_what_becomes_of_it() -> None:
    told = translate(read_job(DENSE + "--bf16 --fp32-residual-connection")).lost
    assert any("fp32_residual_connection" in line and "only the embedding" in line for line in told)


def test_layers_of_one_mixer_each_are_read_with_stages_and_multi_token_prediction() -> None:
    job = DENSE.replace("--num-layers 4", "--position-embedding-type none --mamba-num-heads 4")
    more = "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --mtp-use-repeated-layer"
    found = translate(read_job(f"{job}{more} --hybrid-layer-pattern 'M-*|MM-/*-/*-'"))
    assert found.values["hybrid_override_pattern"] == "M-*MM-"
    assert found.values["num_layers"] == 6
    assert found.values["pipeline_model_parallel_layout"] == "Ettt|tttL"
    assert found.values["mtp_num_layers"] == 2  # as there, whatever --mtp-num-layers says
    assert found.values["mtp_hybrid_override_pattern"] == "*-"
    assert found.values["mtp_use_repeated_layer"]
    assert not [line for line in found.lost if "mtp" in line or "hybrid" in line]
    older = "--mtp-num-layers 1 --is-hybrid-model --hybrid-override-pattern M-*-"
    both = translate(read_job(f"{DENSE}{older} --mtp-hybrid-override-pattern '*-'"))
    assert both.values["mtp_num_layers"] == 1
    assert both.values["mtp_hybrid_override_pattern"] == "*-"
    alone = translate(read_job(DENSE + older))
    assert alone.values["mtp_num_layers"] == 0
    assert any(line.startswith("mtp_num_layers = 1: a hybrid model") for line in alone.lost)
    with pytest.raises(ConfigError, match=r"all MTP modules have the same layers(.|\n)*M-/M/M"):
        translate(read_job(f"{job} --hybrid-layer-pattern 'M-/M/-'"))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            DENSE + "--embed-layernorm --mlp-type residual",
            "--embed-layernorm: no model(.|\n)*--mlp-t",
        ),
        (DENSE + "--deepspeed --num-experts 64", "DeepSpeed's experts"),
        (DENSE.replace("--num-layers", "--num_layers"), "have dashes(.|\n)*--num-layers"),
        (f"V=1\n{DENSE.replace('gpt', 'bert')} --seed $V", "runs pretrain_bert.py"),
        (f"for S in 1 2; do {DENSE} --seed $S; done", "starts 2 jobs: pretrain_gpt.py"),
        ("MODEL_ARGS: 3", "no list of flags"),
        ("A=$B; echo pretrain_gpt.py --lr 1 --bf16 --seed $A", "neither a command line"),
    ],
)
def test_jobs_of_others_are_refused_by_name(job: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(read_job(job))
