"""Every kind of bad input that a person may give, and what the answer has to contain."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A command line that must fail.

    Attributes:
        name: of the kind of mistake.
        argv: what is typed; `RECIPE` stands for the path of `recipe`.
        says: what the message contains.
        recipe: TOML text.
        files: beside the recipe, in the working folder.
        env: variables of the launcher.
    """

    name: str
    argv: str
    says: tuple[str, ...]
    recipe: str | bytes | None = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def layout(name: str, flags: str, *says: str) -> Case:
    """debug-llama: 4 layers, 4 heads, 2 key/value heads, hidden 64, MLP 192, vocabulary 512."""
    return Case(name, f"train debug {flags}", says)


def toml(name: str, recipe: str | bytes, *says: str, flags: str = "") -> Case:
    return Case(name, f"train RECIPE {flags}", says, recipe)


def corpus(name: str, flags: str, *says: str, **files: str | bytes) -> Case:
    named = {k.replace("__", "/").replace("_dot_", "."): v for k, v in files.items()}
    return Case(name, f"data debug --data-cache-path cache {flags}", says, files=named)


def model(name: str, config: object, *says: str) -> Case:
    text = config if isinstance(config, str) else json.dumps(config)
    return Case(name, "train --model hf", says, files={"hf/config.json": text})


NOBODY = "~nobody-is-called-so"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}

LAYOUTS = [
    layout("world is no product", "--nproc 24 --tp 4 --pp 4", "= 16, and 24 / 16 = 1.5", "works:"),
    layout(
        "odd world", "--nproc 3 --tp 2", "3 / 2 = 1.5", "works: --tp 1 --pp 1 --dp-shard 3 --gbs 6"
    ),
    layout(
        "prime world", "--nproc 100000007 --tp 2", "works: --tp 1 --pp 1 --dp-shard 100000007 --gbs"
    ),
    layout("world smaller", "--tp 2", "1 rank cannot be split as tp=2", "--nproc 2"),
    layout("dp given", "--nproc 4 --dp-shard 1", "= 1, and 1 is not 4", "--dp-shard 4"),
    layout("replicas", "--nproc 4 --dp-replicate 3", "dp_replicate 3 = 3, and 4 / 3 = 1.333"),
    layout("no ranks", "--nproc 0", "--nproc must be at least 1, not 0"),
    layout("negative ranks", "--nproc -2", "--nproc must be at least 1, not -2"),
    layout("ranks in words", "--nproc four", "--nproc must be a whole number, or none, not 'four'"),
    layout("tp and heads", "--nproc 8 --tp 8", "4 / 8 = 0.5", "works: --tp 2 | --tp 4"),
    layout(
        "tp and kv heads",
        "--nproc 6 --tp 6 --num-attention-heads 12 --num-query-groups 4 --hidden-size 96",
        "4 key/value heads are neither a multiple nor a divisor of tp 6",
        "4 / 6 = 0.6667, 6 / 4 = 1.5",
    ),
    layout("tp and MLP", "--nproc 4 --tp 4 --ffn-hidden-size 190", "ffn_hidden_size 190", "47.5"),
    layout(
        "tp and vocabulary",
        "--nproc 2 --tp 2 --vocab-size 511 --make-vocab-size-divisible-by 1",
        "padded vocabulary 511",
        "511 / 2 = 255.5",
    ),
    layout("sequence parallel alone", "--sequence-parallel", "size is 1", "--no-sequence-parallel"),
    layout(
        "sequence parallel, odd length",
        "--nproc 2 --tp 2 --sequence-parallel --seq-length 63",
        "63 % 2 = 1",
        "--seq-length 64",
    ),
    layout("pp and layers", "--nproc 3 --pp 3", "4 % (3 x 1) = 1", "--num-layers 6", "Ett|t|tL"),
    layout("pp beyond layers", "--nproc 8 --pp 8", "4 % (8 x 1) = 4", "parallel-size 4"),
    layout("pp, V and layers", "--nproc 2 --pp 2 --vpp 3", "4 % (2 x 3) = 4"),
    layout("absurd V", "--nproc 2 --pp 2 --vpp 1000000000", "4 % (2 x 1000000000) = 4"),
    layout(
        "absurd pp",
        "--nproc 1000000000 --pp 1000000000 --decoder-first-pipeline-num-layers 4",
        "embedding + 4 layers + head = 6",
    ),
    layout(
        "V said twice",
        "--nproc 2 --pp 2 --vpp 2 --num-layers-per-virtual-pipeline-stage 1",
        "exclude each other",
    ),
    layout(
        "layout with an unknown symbol",
        "--nproc 2 --pp 2 --pipeline-model-parallel-layout Ett|xttL",
        "Ett|xttL\n",
        "^",
    ),
    layout(
        "layout with too few layers",
        "--nproc 2 --pp 2 --pipeline-model-parallel-layout Et|tL",
        "2",
        "4",
    ),
    layout(
        "layout and pp",
        "--nproc 2 --pp 2 --pipeline-model-parallel-layout Ett|t|tL",
        "3 stages cannot be laid over 2 pipeline ranks",
        "3 % 2 = 1",
    ),
    layout(
        "layout and V",
        "--nproc 2 --pp 2 --vpp 1 --pipeline-model-parallel-layout Ett|ttL",
        "exclude each other",
    ),
    layout(
        "absurd layout",
        "--nproc 2 --pp 2 --pipeline-model-parallel-layout E(t|)*1000000000L",
        "more than 100000 symbols",
    ),
    layout(
        "ends hold too much",
        "--nproc 2 --pp 2 --decoder-first-pipeline-num-layers 5",
        "4 - 5 = -1",
    ),
    layout(
        "uneven rest",
        "--nproc 4 --pp 4 --decoder-first-pipeline-num-layers 2",
        "4 - 2 = 2; 2 % 3 = 2",
    ),
    layout(
        "ends and accounts",
        "--nproc 2 --pp 2 --decoder-first-pipeline-num-layers 1 "
        "--account-for-embedding-in-pipeline-split",
        "exclude each other",
    ),
    layout("ends without a pipeline", "--decoder-last-pipeline-num-layers 4", "more than one"),
    layout("1f1b over chunks", "--nproc 2 --pp 2 --vpp 2 --pipeline-schedule 1f1b", "works:"),
    layout(
        "unknown schedule",
        "--pipeline-schedule gpip",
        "--pipeline-schedule cannot be 'gpip', did you mean 'gpipe'?",
    ),
    layout("pp 0", "--pp 0", "pipeline_model_parallel_size must be at least 1"),
    layout("tp -2", "--tp -2", "tensor_model_parallel_size must be at least 1, or -1 to infer it"),
    layout("two to infer", "--tp -1", "only one degree can be inferred", "tp and dp_shard are -1"),
    layout("context parallel", "--nproc 2 --cp 2 --seq-length 62", "/ (2 x 2)", "--seq-length 64"),
    layout("expert parallel", "--nproc 2 --ep 2", "num_experts is none"),
    layout("too few experts", "--num-experts 2 --moe-router-topk 3", "--num-experts 3"),
    layout(
        "parts of experts",
        "--num-experts 4 --load donor --moe-use-upcycling --moe-upcycling-granularity 3",
        "4 experts are not whole sets of 3 parts",
        "--moe-upcycling-granularity 2",
    ),
    layout(
        "shared experts of a dense model",
        "--num-experts 4 --load donor --moe-use-upcycling --moe-shared-expert-intermediate-size 64",
        "a dense model has no weights of shared experts",
    ),
    layout(
        "dense layers beside upcycled ones",
        "--num-experts 4 --load donor --moe-use-upcycling --moe-layer-freq [0,1,1,1] "
        "--moe-ffn-hidden-size 64",
        "1 x 64 = 64 in all layers",
        "--ffn-hidden-size 64",
    ),
    layout("layers of experts", "--num-experts 2 --moe-layer-freq [1]*3", "3 entries, 4 layers"),
    layout(
        "an indexer without sizes",
        "--experimental-attention-variant dsa --multi-latent-attention --num-query-groups none",
        "dsa needs dsa_indexer_n_heads, dsa_indexer_head_dim, dsa_indexer_topk",
        "works: --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048",
    ),
    layout(
        "an indexer of some tokens",
        "--nproc 2 --cp 2 --experimental-attention-variant dsa --multi-latent-attention "
        "--num-query-groups none --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 "
        "--dsa-indexer-topk 8",
        "dsa does not go with cp_comm_type p2p",
        "works: --cp-comm-type all_gather | --context-parallel-size 1",
    ),
    layout("a loss of no indexer", "--dsa-indexer-loss-coeff 0.1", "is for attention to tokens"),
    layout("latents of nothing", "--q-lora-rank 8", "works: --multi-latent-attention"),
    layout(
        "planned with only",
        "--model deepseek-v3 --fp4-format e2m1",
        "fp4_format = e2m1",
        "plans with 4-bit multiplications, and does not train with it yet",
    ),
    layout("HSDP of nothing", "--nproc 2 --dp-replicate 2", "no_shard has none"),
    layout("batch and dp", "--nproc 3", "1 x dp 3 = 3, and 8 / 3 = 2.667", "--global-batch-size 9"),
    layout("batch below microbatch", "--mbs 16", "8 / 16 = 0.5", "--global-batch-size 16"),
    layout("no microbatch", "--mbs 0", "micro_batch_size must be at least 1, not 0"),
    layout("no batch", "--gbs 0", "global_batch_size must be at least 1, not 0"),
    layout("absurd batch", "--gbs 1000000000000", "1,000,000,000,000 microbatches", "65,536"),
    layout(
        "two mistakes at once",
        "--nproc 4 --tp 3 --gbs 7 --sequence-parallel",
        "4 / 3 = 1.333",
        "does not divide num_attention_heads 4",
    ),
]

MODELS = [
    Case(
        "unknown preset",
        "train --model lama3-8b",
        ("did you mean 'llama3-8b'?", "works: llama3-8b | llama3-"),
    ),
    Case("convert of nothing", "convert nowhere out", ("there is no such folder",)),
    Case(
        "convert of no weights",
        "convert notes out",
        ("notes is not a run folder", "nor does it hold config.json"),
        files={"notes/a.txt": "x"},
    ),
    Case(
        "ranks of a batch are not whole",
        "translate ds.json --model debug-llama --nproc 4",
        ("32 / (3 x 2) = 5.333 data-parallel ranks (must be whole)",),
        files={
            "ds.json": json.dumps(
                {
                    "train_batch_size": 32,
                    "train_micro_batch_size_per_gpu": 3,
                    "gradient_accumulation_steps": 2,
                }
            )
        },
    ),
    Case("no value", "plan llama3-8b --why", ("--why needs a value: text, or none\n  ",)),
    Case(
        "hub typo", "train --model meta-llama/Llama-3.1-8", ("did you mean 'meta-llama/Llama-3.",)
    ),
    Case("no model", "train", ("no model", "--num-layers", "--vocab-size", "--model llama3-8b")),
    Case("part of a model", "train --num-layers 4 --vocab-size 9", ("--hidden-size", "missing")),
    layout("heads and hidden", "--num-attention-heads 5 --num-query-groups 5", "64 / 5 = 12.80"),
    layout("kv heads and heads", "--num-query-groups 3", "4 / 3 = 1.33", "--num-query-groups 2"),
    layout("odd head size", "--kv-channels 15", "head size 15 is odd"),
    layout("dropout of all", "--hidden-dropout 1.0", "hidden_dropout must be in [0, 1), not 1.0"),
    layout("activation typo", "--activation-func gelu-tanh", "did you mean 'gelu_tanh'?"),
    layout("no layers", "--num-layers 0", "num_layers must be at least 1, not 0"),
    layout("absurd layers", "--num-layers 1000000000", "at most 100000, not 1000000000"),
    layout("negative size", "--hidden-size -64", "hidden_size must be at least 1, not -64"),
    layout("no vocabulary", "--vocab-size 0", "vocab_size must be at least 1"),
    layout(
        "RoPE bounds",
        "--use-rope-scaling --rope-high-freq-factor 0.5",
        "rope_high_freq_factor must not be less",
        "0.5 < 1.0",
    ),
    Case(
        "beyond learned positions",
        "train --model debug-gpt",
        ("seq_length 1024 exceeds the 512 learned positions", "--seq-length 512"),
    ),
    Case(
        "grouped queries without groups",
        "train --model debug-gpt --seq-length 64 --group-query-attention",
        ("--group-query-attention needs --num-query-groups",),
    ),
    model("config.json is no JSON", "{", "hf/config.json is not JSON"),
    model("config.json is a list", [1], "Expected `object`, got `array`"),
    model("unsupported model type", LLAMA | {"model_type": "lama"}, "did you mean 'llama'?"),
    model("config.json lacks a size", {"model_type": "llama"}, "whole number for 'hidden_size'"),
    model(
        "unsupported scaling",
        LLAMA | {"rope_scaling": {"type": "yarn"}},
        "yarn RoPE scaling needs factor",
    ),
    Case("folder without config.json", "train --model .", ("cannot read config.json",)),
]

VALUES = [
    layout("no learning rate", "--lr 0", "lr must be positive, not 0"),
    layout("NaN", "--lr nan", "--lr must be a number, not 'nan'"),
    layout("infinity", "--clip-grad inf", "--clip-grad must be a number, not 'inf'"),
    layout("min above peak", "--lr 1e-4 --min-lr 1e-3", "min_lr 0.001 exceeds lr 0.0001"),
    layout("warm-up is all", "--lr-warmup-iters 10", "nothing to decay before step 10"),
    layout("WSD without a decay", "--lr-decay-style WSD", "needs lr_wsd_decay_iters"),
    layout("beta of 1", "--adam-beta2 1", "adam_beta2 must be in [0, 1), not 1.0"),
    layout("negative clip", "--clip-grad -1", "clip_grad must be 0 or more, not -1"),
    layout("step of nothing", "--ckpt-step 3", "and load is none"),
    layout(
        "adapter of nothing",
        "--load-adapter nope --lora-alpha x",
        "nope is no adapter of PEFT: it has no adapter_config.json",
        "--lora-alpha must be",
    ),
    layout(
        "magnitudes of nothing",
        "--use-dora",
        "use_dora = true has no effect",
        "works: --lora-rank 16 | --no-use-dora",
    ),
    layout(
        "groups of which none is chosen",
        "--num-experts 4 --moe-router-num-groups 2",
        "moe_router_num_groups = 2 needs moe_router_group_topk",
        "works: --moe-router-num-groups none",
    ),
    layout(
        "settings of mixers that no layer has",
        "--hybrid-override-pattern MMMM --window-size 8 --add-qkv-bias --mamba-num-groups 2",
        "window_size = 8 has no effect: it is for layers with attention to a window, and "
        "hybrid_override_pattern is MMMM\n  works: --window-size none\n",
        "add_qkv_bias = true has no effect",
        "num_query_groups = 2 of the recipe is left out",
    ),
    layout(
        "a window where layers have states",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
        "--window-size 8 --window-attn-skip-freq 2 --no-rope-freq 1",
        "no_rope_freq '1' leaves all layers with attention without positions",
    ),
    layout(
        "no layer without positions",
        "--no-rope-freq 5",
        "no_rope_freq = 5 has no effect: it is for layers with attention, but no rotary positions, "
        "and num_layers is 4\n  works: --no-rope-freq none\n",
    ),
    layout(
        "targets of nothing",
        "--lora-target-modules q_proj o_proj",
        "lora_target_modules = q_proj o_proj has no effect",
    ),
    layout(
        "a switch and what it excludes",
        "--swiglu --no-gated-linear-unit",
        "--swiglu contradicts --no-gated-linear-unit",
        "works: --swiglu | --no-gated-linear-unit",
    ),
    layout(
        "all dropped",
        "--lora-rank 4 --lora-dropout 1",
        "lora_dropout must be in [0, 1), not 1.0",
    ),
    layout("negative seed", "--seed -1", "seed must be in 0 .. 2^63 - 1, not -1"),
    layout("seed beyond 63 bits", "--seed 9223372036854775808", "seed must be in 0 .. 2^63 - 1"),
    layout("no steps", "--train-iters 0", "train_iters must be at least 1"),
    layout("no length", "--seq-length 0", "seq_length must be at least 1"),
    layout("tiny tokenizer", "--tokenizer-vocab-size 10", "256 bytes + 1 end of document = 257"),
    layout("all smoothed", "--label-smoothing 1", "label_smoothing must be in [0, 1)"),
    layout("no timeout", "--distributed-timeout-minutes 0", "must be positive"),
    layout("one replica", "--log-straggler", "and there is one"),
    layout(
        "neighbours in latents",
        "--rotary-interleaved --multi-latent-attention --kv-channels none --num-query-groups none",
        "multi_latent_attention has its rotary features in two halves",
        "works: --no-rotary-interleaved",
    ),
    layout(
        "neighbours without RoPE",
        "--rotary-interleaved --position-embedding-type learned_absolute",
        "rotary_interleaved = true has no effect",
        "works: --position-embedding-type rope | --no-rotary-interleaved",
    ),
    layout(
        "projections' inputs discarded and moved",
        "--fine-grained-activation-offloading --offload-modules qkv_linear "
        "--recompute-granularity selective --recompute-modules layernorm",
        "recompute_modules layernorm discards it",
        "works: --offload-modules core_attn attn_proj | --recompute-modules core_attn mlp",
    ),
    layout("no interval", "--log-interval 0", "log_interval must be at least 1"),
    layout(
        "documents in a graph",
        "--cuda-graph-impl local",
        "whose number and lengths differ in each",
        "works: --no-reset-attention-mask | --cuda-graph-impl none",
    ),
    layout(
        "buckets of gradients that FSDP2 sums",
        "--nproc 2 --tp 1 --no-sequence-parallel --bf16 --optimizer-cpu-offload "
        "--grad-reduce-in-bf16 --ddp-bucket-size 1000",
        "grad_reduce_in_bf16 has no effect on no_shard of bf16 with optimizer_cpu_offload",
        "ddp_bucket_size has no effect on no_shard of bf16 with optimizer_cpu_offload",
        "works: --ddp-bucket-size 2097152 | --no-optimizer-cpu-offload | --fp32",
    ),
    layout(
        "no layer between ends in bf16",
        "--bf16 --fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
        "of 4, 3 at the start + 1 at the end keep bf16",
        "works: --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1 | "
        "--no-first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1",
    ),
    layout(
        "no end in bf16",
        "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0 "
        "--num-layers-at-end-in-bf16 0",
        "num_layers_at_start_in_bf16 0 + num_layers_at_end_in_bf16 0",
        "works: --num-layers-at-start-in-bf16 1 | --num-layers-at-end-in-bf16 1",
    ),
    layout(
        "ends in bf16 of a model in bf16",
        "--bf16 --first-last-layers-bf16",
        "it keeps layers in bf16 where others multiply in 8 or 4 bits",
        "works: --fp8-format hybrid | --no-first-last-layers-bf16",
    ),
    layout(
        "host within a graph",
        "--nproc 2 --pp 2 --cuda-graph-impl local --hidden-dropout 0.1 --optimizer-cpu-offload "
        "--no-reset-attention-mask",
        "pipeline ranks (pp 2)",
        "works: --hidden-dropout 0 | --cuda-graph-impl none",
        "works: --no-optimizer-cpu-offload | --cuda-graph-impl none",
    ),
    layout(
        "graph of another trainer",
        "--enable-cuda-graph",
        "did you mean --cuda-graph-impl?",
    ),
]

COMMAND_LINES = [
    Case("unknown command", "trian", ("unknown command 'trian', did you mean 'train'?",)),
    Case("unknown first flag", "--verison", ("unknown flag '--verison'",)),
    layout("flag typo", "--sequence-paralel", "did you mean --sequence-parallel?"),
    layout("abbreviation", "--micro-batch 2", "unknown flag --micro-batch", "--micro-batch-size"),
    layout("short abbreviation", "--adam 2", "did you mean --adam-"),
    layout("value missing", "--tp", "--tp needs a value: a whole number"),
    layout("value missing before a flag", "--tp --dry-run", "--tp needs a value"),
    layout("no values for a list", "--data-path", "--data-path needs a value"),
    layout("fraction of a rank", "--tp 2.5", "--tp must be a whole number, not '2.5'"),
    layout("words for a number", "--lr=high", "--lr must be a number, not 'high'"),
    layout("switch with a word", "--sequence-parallel true", "stands alone, without 'true'"),
    layout("switch with a number", "--sequence-parallel=3", "must be true or false, not '3'"),
    layout("off with a value", "--no-overlap-grad-reduce=1", "takes no value"),
    layout("no of a number", "--no-lr", "unknown flag --no-lr"),
    layout("switch contradicts switch", "--bf16 --fp32", "--fp32 contradicts --bf16"),
    layout(
        "switch contradicts flag",
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
        "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy",
        "works: --use-distributed-optimizer | --data-parallel-sharding-strategy optim_grads",
    ),
    layout("pasted dash", "\u2013\u2013tp 2", "did you mean --tp?"),
    layout("single dash", "-tp 2", "unknown flag -tp, did you mean --tp?"),
    layout(
        "a schedule of batches",
        "--step-batch-size-schedule 0:16 100:32",
        "unknown flag --step-batch-size-schedule, did you mean --rampup-batch-size?",
        "by equal parts",
    ),
    layout("another argument", "more", "unexpected argument 'more'"),
    layout(
        "retained checkpoints are not saved",
        "--save-interval 4 --save-retain-interval 6",
        "save_retain_interval 6 is no multiple of save_interval, which is 4",
        "works: --save-interval 6 | --save-retain-interval 8",
    ),
    layout(
        "retained checkpoints without an interval",
        "--save-retain-interval 6 --save-interval auto",
        "which is auto",
        "works: --save-interval 6",
    ),
    layout(
        "retained beside all",
        "--save-interval 3 --save-retain-interval 6 --keep-latest-k none",
        "save_retain_interval",
        "--keep-latest-k 1",
    ),
    layout(
        "steps to skip beyond the run",
        "--train-iters 20 --iterations-to-skip 5 20",
        "iterations_to_skip 20 is beyond the run, whose steps are 0 to 19",
        "works: --iterations-to-skip 19 | --train-iters 21",
    ),
    layout("choice typo", "--precision fp23", "cannot be 'fp23', did you mean 'fp32'?", "bf16 |"),
    layout("none where it cannot be", "--tp none", "--tp must be a whole number, not 'none'"),
    layout("none for a choice", "--precision none", "works: bf16 | fp16 | fp32 | fp64"),
    layout("empty value", "--tp=", "--tp must be a whole number, not ''"),
    layout(
        "all mistakes at once",
        "--tp x --lr y --wrong-thing 3",
        "--tp must be",
        "--lr must be",
        "unknown flag --wrong-thing",
    ),
    Case("sample without a run", "sample", ("RUN is missing",)),
    Case("load of nothing", "train debug --load nope", ("there is no checkpoint in nope",)),
    Case("load is empty", "train debug --load ''", ("load is empty",)),
    Case("save is empty", "train debug --save ''", ("--save is empty",)),
    Case("save into a file", "train debug --save f/run", ("f is not a folder",), files={"f": ""}),
    Case("sample of no run", "sample nowhere hello", ("nowhere is not a run folder",)),
    Case("sample below zero", "sample . --temperature -1", ("--temperature must be 0 or more",)),
    Case("sample typo", "sample . --max-token 3", ("did you mean --max-tokens?",)),
    Case("run's flags elsewhere", "sample . --bf16", ("unknown flag --bf16",)),
    Case("ranks that measure nothing", "plan --calibrate m.toml --nproc 0", ("--nproc must be",)),
    Case("rehearsed by nobody", "rehearse debug --jobs 0", ("--jobs must be at least 1, not 0",)),
    Case("rehearsed by fewer", "rehearse debug --jobs -1", ("--jobs must be at least 1, not -1",)),
    Case("looks in a row", "watch . --interval 0", ("--interval must be in (0, 86,400], not 0.0",)),
    Case("a look in an age", "watch . --interval 1e300", ("in (0, 86,400], not 1e+300",)),
    Case("doctor with words", "doctor now", ("unexpected argument 'now'",)),
    Case("data of no recipe", "data demmo", ("did you mean 'demo'?",)),
]

MODEL = '[model]\npreset = "debug-llama"\n'

RECIPES = [
    Case(
        "unknown recipe", "train llama-8b", ("did you mean 'llama3-8b'?", "works: debug | debug-")
    ),
    Case("no recipe file", "train dir/my.toml", ("no such recipe file: dir/my.toml",)),
    Case(
        "recipe file typo",
        "train mny.toml",
        ("did you mean 'my.toml'?",),
        files={"my.toml": MODEL},
    ),
    Case(
        "model for a recipe",
        "train llama3-70b",
        ("'llama3-70b' is a model, not a recipe", "works: --model llama3-70b"),
    ),
    Case(
        "folder of a model for a recipe",
        "verify hf --nproc 2",
        ("'hf' is a model, not a recipe", "works: --model hf"),
        files={"hf/config.json": "{}"},
    ),
    Case("folder for a recipe", "train .", ("a recipe is a .toml file, not a folder: .",)),
    Case(
        "run for a recipe",
        "train ./run",
        ("a .toml file, not a folder: ./run", "works: run/config.toml"),
        files={"run/config.toml": "[model]\npreset = 'gpt2'\n"},
    ),
    toml("TOML syntax", "[model]\npreset = \n", "recipe.toml:2:10: ", "preset = "),
    toml("TOML cut short", '[model]\npreset = "debug', "recipe.toml:2"),
    toml("TOML key twice", MODEL + 'preset = "gpt2"\n', "recipe.toml:3"),
    toml("not UTF-8", b"[model]\npreset = '\xff'\n", "is not UTF-8 text: byte 18"),
    toml("no model in it", "[training]\nseed = 1\n", "no model"),
    toml(
        "unknown section", MODEL + "[trainig]\n", "unknown section [trainig], did you mean 'train"
    ),
    toml(
        "unknown key", MODEL + "hiden_size = 3\n", "'hiden_size' in [model], did you mean 'hidden_"
    ),
    toml(
        "short name", MODEL + "[parallel]\ntp = 2\n", "'tensor_model_parallel_size' in [parallel]"
    ),
    toml("wrong section", MODEL + "lr = 3\n", "[model] lr belongs in [optimizer]"),
    toml("preset in the wrong section", "[data]\npreset = 'gpt2'\n", "preset belongs in [model]"),
    toml("key above sections", "seed = 1\n" + MODEL, "seed belongs in [training], not above"),
    toml("unknown key above", "sead = 1\n" + MODEL, "unknown key 'sead', did you mean 'seed'?"),
    toml("section as a value", "model = 'gpt2'\n", "model is a section: write [model]"),
    toml("section in a section", MODEL + "[parallel.tensor]\nsize = 2\n", "unknown key 'tensor'"),
    toml("text for a number", MODEL + "num_layers = '4'\n", "must be a whole number, not '4'"),
    toml("number for text", MODEL + "[data]\nsplit = 1\n", "split must be text, not 1"),
    toml("switch for a number", MODEL + "num_layers = true\n", "must be a whole number, not true"),
    toml("number for a switch", MODEL + "gated_linear_unit = 1\n", "must be true or false, not 1"),
    toml("fraction", MODEL + "num_layers = 4.0\n", "must be a whole number, not 4.0"),
    toml("NUL", MODEL + '[checkpoint]\nsave = "\\u0000"\n', "save must be text", "not '\\x00'"),
    toml("date", MODEL + "[optimizer]\nlr = 2024-01-01\n", "lr must be a number, not"),
    toml("infinite", MODEL + "[optimizer]\nlr = inf\n", "lr must be a number, not inf"),
    toml("numbers for paths", MODEL + "[data]\ndata_path = [1]\n", "list of texts, not [1]"),
    toml("choice", MODEL + "normalization = 'RMS'\n", "did you mean 'RMSNorm'?", "RMSNorm | Layer"),
    toml("unknown preset in it", '[model]\npreset = "gpt3"\n', "unknown model 'gpt3'", "'gpt2'"),
    toml("recipe for a model", MODEL, "is a recipe, where a preset", flags="--model RECIPE"),
    toml("preset is no text", "[model]\npreset = 2\n", "preset must be text, not 2"),
    toml(
        "recipe and flags",
        MODEL + "[optimizer]\nlearning_rate = 1\n[trainig]\n",
        "unknown flag --sead, did you mean --seed?",
        "unknown key 'learning_rate' in [optimizer]",
        "unknown section [trainig]",
        flags="--sead 1",
    ),
]

LAUNCHERS = [
    Case("WORLD_SIZE alone", "train debug", ("WORLD_SIZE is 4 but RANK",), env={"WORLD_SIZE": "4"}),
    Case("RANK alone", "train debug", ("RANK set, but not WORLD_SIZE",), env={"RANK": "0"}),
    Case(
        "two launchers",
        "train debug --nproc 2",
        ("--nproc 2 starts ranks, and torchrun has started 2",),
        env={
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        },
    ),
]

DOCUMENT = "It is only a short text. " * 4

CORPORA = [
    corpus("no such corpus", "--data-path nothere.txt", "no such file or folder: nothere.txt"),
    *(
        corpus(f"{flag} of nobody", f"{beside}{flag} {path}", f"knows no home {NOBODY}")
        for flag, path, beside in (
            ("--data-path", f"{NOBODY}/*.txt", ""),
            ("--valid-data-path", f"held={NOBODY}/x", "--eval-interval 2 "),
            ("--tokenizer-model", f"{NOBODY}/t", ""),
            ("--data-cache-path", f"{NOBODY}/c", ""),
        )
    ),
    corpus(
        "corpus typo", "--data-path texd.txt", "did you mean 'text.txt'?", text_dot_txt=DOCUMENT
    ),
    corpus(
        "a blend of made-up numbers", "--data-path mock builtin", "mock cannot be part of a blend"
    ),
    corpus(
        "text beside made-up numbers",
        "--mock-data --sft --valid-data-path x=builtin y=mock",
        "mock holds no conversations",
        "entry 2 of valid_data_path, 'y=mock', names made-up tokens",
    ),
    corpus(
        "a tokenizer for numbers",
        "--mock-data --tokenizer-model texts",
        "--mock-data contradicts --tokenizer-model",
    ),
    Case(
        "no number beside the end of a document",
        "train debug --mock-data --vocab-size 1",
        (
            "vocab_size 1 is too small for numbers",
            "  1 number + 1 end of document = 2",
            "  works: --vocab-size 2 | --vocab-size 8192",
        ),
    ),
    Case(
        "a model with fewer entries than the smallest tokenizer",
        "train debug --data-path builtin --vocab-size 100 --tokenizer-vocab-size 50",
        (
            "tokenizer_vocab_size 50 is too small for a byte-level BPE",
            "  works: --vocab-size 257 --tokenizer-vocab-size 257 | ",
        ),
    ),
    Case(
        "all of what has no end",
        "train debug --mock-data --full-validation --eval-interval 5",
        ("full_validation = true has no effect: it reads each sample once",),
    ),
    corpus("odd weights", "--data-path 0.3 a 0.7", "data_path has 3 entries"),
    corpus("weight of nothing", "--data-path 0 a 1 b", "weight 0 in data_path is not positive"),
    corpus("weight for a path", "--data-path 1 2", "entry 2 of data_path is 2, where a path"),
    corpus(
        "folders called by years",
        "--data-path 2023 2024",
        "a number in data_path is a weight; files or folders are called 2023, 2024",
        "works: --data-path ./2023 ./2024",
        **{"2023__a_dot_txt": DOCUMENT, "2024__a_dot_txt": DOCUMENT},
    ),
    corpus(
        "a folder called by its year",
        "--data-path 2024",
        "works: --data-path ./2024",
        **{"2024__a_dot_txt": DOCUMENT},
    ),
    corpus(
        "validation sets without names",
        "--valid-data-path a b=c b=d --eval-interval 5",
        "entry 1 of valid_data_path, 'a', has no name",
        "two entries of valid_data_path are called b: c and d",
    ),
    corpus(
        "no validation set",
        "--valid-data-path few=nothere --eval-interval 5",
        "validation set few: no such file or folder: nothere",
    ),
    corpus("split in words", "--split most,rest", "split 'most,rest' is not up to three shares"),
    corpus("split below zero", "--split=-1,2,3", "split '-1,2,3'"),
    corpus("split of nothing", "--split 0,0,0", "split '0,0,0'"),
    corpus("folder of other files", "--data-path d", "nothing to read in d", d__a_dot_png=b"\x89"),
    corpus("unknown extension", "--data-path a.png", "unknown extension '.png'", a_dot_png=b"x"),
    corpus("Latin-1", "--data-path a.txt", "byte 2 is 0xe9", "iconv", a_dot_txt=b"ab\xe9" * 99),
    corpus(
        "not JSON", "--data-path a.jsonl", "a.jsonl:2 is not JSON", a_dot_jsonl='{"text":"a"}\n{'
    ),
    corpus("JSON list", "--data-path a.jsonl", "is a list, not an object", a_dot_jsonl="[1]"),
    corpus("no text key", "--data-path a.jsonl", "no key 'text'", a_dot_jsonl='{"txt": "a"}'),
    corpus(
        "text is no text", "--data-path a.jsonl", "'text' is a number", a_dot_jsonl='{"text": 1}'
    ),
    corpus("no text", "--data-path a.txt", "no text in 1 file", a_dot_txt=""),
    corpus(
        "garbled Parquet", "--data-path a.parquet", "cannot be read as Parq", a_dot_parquet=b"?"
    ),
    corpus(
        "too short", "--data-path a.txt --split 1 --seq-length 4096", "4096", a_dot_txt=DOCUMENT
    ),
    corpus(
        "tokens without a tokenizer",
        "--data-path p",
        "tokenizer_model",
        p_dot_bin=b"",
        p_dot_idx=b"",
    ),
    corpus("no tokenizer", "--tokenizer-model t.json", "t.json"),
    corpus("garbled tokenizer", "--tokenizer-model t.json", "t.json", t_dot_json="{"),
    Case(
        "corpus of a run",
        "train debug --nproc 2 --data-path nothere",
        ("no such file or folder: nothere",),
    ),
    Case(
        "data of a recipe",
        "train gpt2",
        (
            "no such file or folder: data/openwebtext\n  looked for: /",
            "get it with: hf download Skylion007/openwebtext",
            "no tokenizer at data/gpt2/tokenizer.json",
            "get it with: hf download openai-community/gpt2 tokenizer.json",
            "  try:   --data-path builtin --tokenizer-model none | "
            "--data-path mock --tokenizer-model none",
        ),
    ),
    Case(
        "tokenizer of a recipe",
        "train gpt2 --data-path builtin --nproc 2 --gbs 32",
        ("no tokenizer at data/gpt2/tokenizer.json", "  try:   --tokenizer-model none"),
    ),
    Case("restarts", "train debug --dry-run --max-restarts -1", ("must be 0 or more, not -1",)),
    Case(
        "schedule that others name",
        "schedule interleaved",
        ("unknown schedule 'interleaved', did you mean 'interleaved_1f1b'?",),
    ),
    Case(
        "stages of a schedule",
        "schedule zb_v --chunks 3",
        ("zb_v schedule needs two stages per rank, placed in a V, and --chunks is 3",),
    ),
    Case(
        "a schedule by what it is",
        "schedule synthesised",
        ("unknown schedule 'synthesised', did you mean 'auto'?",),
    ),
    Case(
        "a setting of training elsewhere",
        "eval run --lr 3",
        ("unknown flag --lr\n  it is a setting of training: fivefold train takes it",),
    ),
    Case("split of a preview", "train debug --dry-run --split x", ("split 'x' is not",)),
]

CASES = [*LAYOUTS, *MODELS, *VALUES, *COMMAND_LINES, *RECIPES, *LAUNCHERS, *CORPORA]
