"""Ugly models in every layout that fits eight ranks, and how a test verifies one."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING
from fivefold.data_parallel.policy import DTYPES
from fivefold.layout import Layout
from fivefold.verify.compare import compare
from fivefold.verify.reference import load_trace, run_reference, save_trace
from fivefold.verify.report import VerifyReport
from fivefold.verify.shrink import prepare
from fivefold.verify.standing_in import experts_depend
from tests.pool import run

STEPS = 2

# Few and uneven KV heads, head sizes that do not add up to the hidden size, widths that no
# sharding divides, a padded vocabulary.
LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=20,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    ffn_hidden_size=36,
    vocab_size=99,
    make_vocab_size_divisible_by=52,
    max_position_embeddings=64,
    qk_layernorm=True,
    init_method_std=0.1,
)
GPT = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=44,
    vocab_size=99,
    make_vocab_size_divisible_by=52,
    max_position_embeddings=18,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu_tanh",
    gated_linear_unit=False,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    init_method_std=0.1,
)
LATENT = ModelConfig(
    num_layers=3,
    hidden_size=20,
    num_attention_heads=4,
    ffn_hidden_size=36,
    vocab_size=99,
    make_vocab_size_divisible_by=52,
    max_position_embeddings=64,
    multi_latent_attention=True,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_head_dim=5,
    qk_pos_emb_head_dim=4,
    v_head_dim=7,
    latent_norm_epsilon=0.01,
    rope_type="yarn",
    original_max_position_embeddings=8,
    mscale_all_dim=1.0,
    init_method_std=0.1,
)
SPARSE = replace(
    LATENT,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=3,
    dsa_indexer_head_dim=6,
    dsa_indexer_topk=5,
    dsa_indexer_loss_coeff=0.7,
    init_method_std=0.3,
)
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 8,
    "moe_layer_freq": "[1,0,1]",
}
MIXTURE = replace(LLAMA, **EXPERTS)
CHUNKED = replace(
    LLAMA,
    **EXPERTS | {"moe_router_topk": 1},
    qk_layernorm=False,
    qk_l2_norm=True,
    attention_chunk_size=5,
    no_rope_freq="3",
    attn_temperature_tuning=True,
    attn_scale=0.4,
    floor_scale=3,
    moe_router_score_function="sigmoid",
    moe_apply_probs_on_input=True,
)
SINKS = replace(
    LLAMA,
    qk_layernorm=False,
    add_bias_linear=True,
    softmax_type="learnable",
    window_size=3,
    window_attn_skip_freq="2",
    activation_func="quick_gelu",
    glu_linear_offset=1.0,
    activation_func_clamp_value=0.05,
    rope_type="yarn",
    rotary_scaling_factor=4.0,
    original_max_position_embeddings=8,
    yarn_correction_range_round_to_int=False,
)
# Layers with a window have more and larger heads, and sinks; values are smaller than keys.
LOCAL = replace(
    LLAMA,
    v_channels=5,
    value_multiplier=0.7,
    window_size=3,
    window_attn_skip_freq="2",
    num_query_groups_local=4,
    kv_channels_local=12,
    softmax_type_local="learnable",
    rotary_base_local=100.0,
    rotary_percent=0.34,
)
# Of layers without a window, which have larger heads, keys are values before their norm.
WHOLE = replace(
    LLAMA,
    kv_channels=12,
    num_query_groups=1,
    keys_as_values=True,
    v_l2_norm=True,
    layer_scalar=0.6,
    rope_type="proportional",
    rotary_percent=0.34,
    rotary_base_local=100.0,
    window_size=3,
    window_attn_skip_freq="2",
    num_query_groups_local=2,
    kv_channels_local=6,
    untie_embeddings_and_output_weights=False,
)
NEOX = replace(
    GPT,
    position_embedding_type="rope",
    rotary_percent=0.34,
    rotary_interleaved=True,
    no_rope_freq="2",
    parallel_residual=True,
    activation_func="gelu",
    untie_embeddings_and_output_weights=True,
)
# Norms without weights, of embeddings, too, as in nanochat; bounds of projections, as in OLMo.
BARE = replace(
    LLAMA,
    norm_elementwise_affine=False,
    embed_layernorm=True,
    qk_layernorm=False,
    qk_l2_norm=True,
    clip_qkv=0.3,
    activation_func="squared_relu",
    gated_linear_unit=False,
    lm_head_bias=True,
)
# Phi's and GPT-J's layers, with a norm of embeddings that has weights, as BLOOM's.
PHI = replace(
    NEOX,
    parallel_residual_one_norm=True,
    no_rope_freq=None,
    add_bias_linear=False,
    attention_out_bias=True,
    mlp_bias=True,
    lm_head_bias=True,
    embed_layernorm=True,
)
LONG: dict[str, Any] = {  # rows of 16 tokens are longer
    "rope_type": "longrope",
    "use_rope_scaling": False,
    "original_max_position_embeddings": 12,
    "longrope_short_factor": (1.0, 1.2, 1.7),
    "longrope_long_factor": (1.4, 3.0, 7.0),
    "qk_layernorm_after_rope": True,
    "attn_temperature_tuning": True,
    "attn_temperature_rotated": True,
    "attn_scale": 0.4,
    "floor_scale": 3,
    "gated_linear_unit": False,
    "activation_func": "xielu",
}
ONE_NORM: dict[str, Any] = {"parallel_residual_one_norm": True, "layernorm_bias": False}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.7,
    "softmax_scale": 0.6,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 0.9,
}
DELTA = replace(
    LLAMA,
    apply_layernorm_1p=True,
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="[1,0,1]",
    init_method_std=0.3,
    norm_epsilon=1e-3,  # what a state gives its first tokens may be next to nothing
    linear_conv_kernel_dim=3,
    linear_key_head_dim=16,  # of few features, some are as good as 0, and their gradients huge
    linear_value_head_dim=12,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
)
KIMI = replace(
    LATENT,
    position_embedding_type="none",
    rope_type="rope",
    original_max_position_embeddings=4096,
    mscale_all_dim=0.0,
    experimental_attention_variant="kimi_delta_attention",
    linear_attention_freq="[1,0,1]",
    init_method_std=0.3,
    norm_epsilon=1e-3,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
)
CONVOLVING = replace(
    LLAMA,
    qk_layernorm=True,
    experimental_attention_variant="short_convolution",
    linear_attention_freq="[1,0,1]",
    linear_conv_kernel_dim=3,
)
HYBRID = replace(
    LLAMA,
    hybrid_override_pattern="M*-",
    position_embedding_type="none",
    rotary_base=10000.0,
    use_rope_scaling=False,
    activation_func="squared_relu",
    gated_linear_unit=False,
    init_method_std=0.2,
    mamba_state_dim=6,
    mamba_head_dim=6,
    mamba_num_groups=4,
    mamba_num_heads=8,
)
MODELS = {
    "hybrid": HYBRID,
    "hybrid tied": replace(
        HYBRID, hybrid_override_pattern="-M*", untie_embeddings_and_output_weights=False
    ),
    "hybrid, experts": replace(
        HYBRID,
        **EXPERTS | {"hybrid_override_pattern": "ME*", "moe_layer_freq": "1"},
        ffn_hidden_size=None,
        moe_latent_size=10,
    ),
    "kimi": KIMI,
    "kimi, experts": replace(KIMI, **EXPERTS, q_lora_rank=None),
    "delta": DELTA,
    "convolving": CONVOLVING,
    "convolving tied": replace(CONVOLVING, untie_embeddings_and_output_weights=False),
    "delta tied": replace(DELTA, untie_embeddings_and_output_weights=False),
    "delta, experts": replace(DELTA, **EXPERTS, moe_shared_expert_gate=True),
    "local": LOCAL,
    "whole": WHOLE,
    "local, experts": replace(LOCAL, **EXPERTS),
    "sinks": SINKS,
    "neox": NEOX,
    "bare": BARE,
    "bare, LayerNorm, tied": replace(
        BARE, normalization="LayerNorm", untie_embeddings_and_output_weights=False
    ),
    "phi": PHI,
    "oss": replace(
        SINKS, rotary_base_local=100.0, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12
    ),
    "latent": LATENT,
    "latent, plain queries": replace(
        LATENT,
        q_lora_rank=None,
        add_bias_linear=True,
        normalization="LayerNorm",
        attn_temperature_tuning=True,
        attn_temperature_rotated=True,
        attn_scale=0.4,
        floor_scale=3,
        **MULTIPLIERS,
    ),
    "sparse": SPARSE,
    "sparse, latents of chosen": replace(SPARSE, dsa_indexer_use_sparse_loss=True),
    "sparse, not taught": replace(SPARSE, dsa_indexer_loss_coeff=None),
    "sparse, chosen alone, plain queries": replace(
        SPARSE,
        q_lora_rank=None,
        add_bias_linear=True,
        normalization="LayerNorm",
        dsa_indexer_use_sparse_loss=True,
    ),
    "sparse, experts, not taught": replace(
        SPARSE, **EXPERTS, mtp_num_layers=1, dsa_indexer_loss_coeff=None
    ),
    "sparse, experts": replace(SPARSE, **EXPERTS),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "gpt": GPT,
    "gpt, positions from the third row": replace(
        GPT, activation_func="relu", position_embedding_offset=2, embedding_dropout=0.0
    ),
    "gpt untied": replace(GPT, untie_embeddings_and_output_weights=True, **MULTIPLIERS),
}

# (pp, V) -> uneven stages, empty ones, ends without a layer
STAGES = {
    (2, 1): "Et|ttL",
    (2, 2): "E|t|t|tL",
    (4, 1): "Et|t||tL",
    (4, 2): "E|t|||t|t||L",
}
# Splits of one sample's work; what they leave of the ranks is data parallel.
SPLITS = ("pipeline_model_parallel", "tensor_model_parallel", "context_parallel")
STRATEGIES = tuple(SHARDING)


def config(model: ModelConfig, ranks: int | None = None, **values: Any) -> Config:
    """A small batch of that model; precision fp64 unless said otherwise.

    With a number of ranks, the batch has two microbatches on a rank, or two for each stage of a
    pipeline, but at most 8 sequences.
    """
    settings = {
        "seq_length": 16,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "precision": "fp64",
        "label_smoothing": 0.1,
        "z_loss_coeff": 0.02,
    } | values
    if ranks is not None and "global_batch_size" not in values:
        degrees = [settings.get(f"{kind}_size", 1) for kind in SPLITS]
        each = 2 * settings["micro_batch_size"] * settings.get(SPLITS[0] + "_size", 1)
        settings["global_batch_size"] = min(ranks // prod(degrees) * each, 8)
    return Config(model=model).with_values(**settings)


def named(**values: Any) -> dict[str, Any]:
    """Settings by their names, of which degrees, strategy and dispatcher may have short ones."""
    short = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "strategy": "data_parallel_sharding_strategy",
        "dispatcher": "moe_token_dispatcher_type",
        "replicas": "num_distributed_optimizer_instances",
    }
    found = {short.get(key, key): value for key, value in values.items()}
    splits = {"sequence_parallel": True} if values.get("tp", 1) > 1 else {}
    return splits | found


def flags(
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    sequence: bool = False,
    stages: str | None = None,
    strategy: str = "no_shard",
    replicas: int = 1,
) -> dict[str, Any]:
    """The settings of a layout, with 1 to 4 of the batch's microbatches on a rank.

    Eight data-parallel ranks have one, and 4 stages on 4 x 2 ranks have fewer than stages.
    """
    stages = stages or STAGES.get((pp, 1))
    interleaved = stages is not None and stages.count("|") + 1 > pp
    return {
        "micro_batch_size": 1 if dp > 2 or (dp == 2 and pp == 4 and interleaved) else 2,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": sequence,
        "pipeline_model_parallel_size": pp,
        "pipeline_model_parallel_layout": stages,
        "data_parallel_sharding_strategy": strategy,
        "num_distributed_optimizer_instances": replicas,
    }


def matrix(world_size: int) -> Iterator[dict[str, Any]]:
    """The settings of every combination on so many ranks."""
    for tp in (1, 2, 4):
        for (pp, _), stages in {(1, 1): None, **STAGES}.items():
            dp = world_size // (tp * pp)
            if dp * tp * pp != world_size:
                continue
            for sequence in (False, True)[: min(tp, 2)]:
                for strategy, replicas in _sharding(dp):
                    yield flags(
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        sequence=sequence,
                        stages=stages,
                        strategy=strategy,
                        replicas=replicas,
                    )


def _sharding(dp: int) -> Iterator[tuple[str, int]]:
    for strategy in STRATEGIES:
        yield strategy, 1
        for replicas in (2, 4):
            if strategy != "no_shard" and replicas < dp:
                yield strategy, replicas


def name(case: dict[str, Any]) -> str:
    """Short, for a test id."""
    tp, pp = case["tensor_model_parallel_size"], case["pipeline_model_parallel_size"]
    words = [f"tp{tp}"] * (tp > 1) + ["sp"] * case["sequence_parallel"]
    words += [f"pp{pp} {case['pipeline_model_parallel_layout']}"] * (pp > 1)
    replicas = case["num_distributed_optimizer_instances"]
    words += [case["data_parallel_sharding_strategy"] + f" x{replicas}" * (replicas > 1)]
    return " ".join(words)


def chosen(cases: Collection[Any], *names: Any) -> list[Any]:
    """Parameters of a test: the named cases, which are no row of the matrix, and for
    `-m exhaustive` the others."""
    assert set(names) <= set(cases)
    return [
        case if case in names else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


def verify_in_pool(
    world_size: int,
    settings: Config,
    plant: str | None = None,
    on_rank: Callable[..., VerifyReport | None] | None = None,
    steps: int = STEPS - 1,
) -> VerifyReport:
    """`fivefold.verify.run.verify` on processes that are there already.

    `on_rank` is called instead of `compare_on_rank`, with its arguments. What a step keeps for the
    next one shows in two; the rows of test_matrix.py run as many as the command does. One step,
    after which weights are compared, too, is enough where what is asked about keeps nothing.
    """
    layout, _ = prepare(check(settings, world_size))
    prepared = layout.config
    bare = prepared.with_values(precision="fp64")
    if not (prepared.parallel.zero_quantized_weights or experts_depend(prepared)):
        bare = replace(bare, parallel=Config(model=prepared.model).parallel)
    baseline = None
    if prepared.training.precision != "fp64":
        baseline = _trace(bare, DTYPES[prepared.training.precision], steps)
    fn = on_rank or compare_on_rank
    return run(world_size, fn, layout, _trace(bare, torch.float64, steps), baseline, plant)[0]


@cache
def _trace(settings: Config, dtype: torch.dtype, steps: int) -> Path:
    exact = dtype == torch.float64
    followed = () if exact else load_trace(_trace(settings, torch.float64, steps))
    folder = Path(_folder().name)
    path = folder / str(len(list(folder.iterdir())))
    save_trace(path, run_reference(settings, steps, dtype, followed))
    return path


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="fivefold-traces-")


def compare_on_rank(
    rank: int,
    world_size: int,
    layout: Layout,
    trace: Path,
    baseline: Path | None,
    plant: str | None,
) -> VerifyReport | None:
    with shared_groups(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        return compare(
            layout,
            rank,
            torch.device("cpu"),
            loaded(trace),
            baseline=loaded(baseline) if baseline else (),
            plant=plant,
        )


loaded = cache(load_trace)  # of this rank, for all layouts of the same model


@contextmanager
def shared_groups(backend: str | None = None) -> Iterator[None]:
    """Let hundreds of layouts share the few groups that they are made of: sockets are scarce.

    torch names a group by its ranks and by how many groups the process has; groups that are made
    once are named by their ranks, and by how many of them a layout has already made of these.
    Afterwards every process has equally many again. `backend` is that of all groups but the world.
    """
    made: Counter[tuple[int, ...]] = Counter()

    def shared(ranks: list[int] | None, **options: Any) -> dist.ProcessGroup:
        if ranks is None:  # named by its members, too: ranks may have made different numbers
            ranks = list(range(dist.get_world_size()))
            options["use_local_synchronization"] = True
        options |= {"backend": backend} if backend is not None else {}
        key = tuple(ranks), made[tuple(ranks)], backend
        made[tuple(ranks)] += 1
        if key not in _groups:
            with patch.object(distributed_c10d, "_hash_ranks_to_str", lambda _: f"shared {key}"):
                _groups[key] = _new_group(ranks, **options)
        return _groups[key]

    with patch.object(dist, "new_group", shared):
        yield
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(distributed_c10d._world.pg_names))
    for place in range(counts[dist.get_rank()], max(counts)):
        # Only counted: a group of gloo's has three threads, one of which wakes every 10 ms.
        distributed_c10d._world.pg_names[dist.ProcessGroup(0, 1)] = f"counted {place}"


_new_group = dist.new_group
# Of this process, as long as it lives.
_groups: dict[tuple[tuple[int, ...], int, str | None], dist.ProcessGroup] = {}
