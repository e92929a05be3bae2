"""Checks the degrees of tensor, expert and context parallelism against the model."""

from collections.abc import Callable, Collection
from math import isqrt, prod

from fivefold.config.config import Config
from fivefold.config.divisors import divisors, nearest
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.rules.sparse import check_sparse_ranks
from fivefold.errors import Mistakes


def tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """The tensor-parallel sizes that the model allows."""
    groups = [own.num_kv_heads for own in model.attentions]
    sizes = [size for _, size in _split_over_tp(model)]
    return [
        d
        for d in divisors(model.num_attention_heads)
        if all(kv % d == 0 or d % kv == 0 for kv in groups) and not any(size % d for size in sizes)
    ]


def _split_over_tp(model: ModelConfig) -> list[tuple[str, int]]:
    """Name and size of everything that tensor parallelism splits."""
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        _groups_setting(model): model.states.groups * model.has_linear_layers,
        "ffn_hidden_size": model.ffn_size if model.has_dense_layers else 0,
        "moe_shared_expert_intermediate_size": model.shared_ffn_size,
        "padded vocabulary": model.padded_vocab_size,
        "hidden_size, which mtp_num_layers projects to,": (
            model.hidden_size if model.mtp_num_layers else 0
        ),
    }
    return [(name, size) for name, size in sizes.items() if size]


def _groups_setting(model: ModelConfig) -> str:
    """The setting with the number of groups (or key heads) that ranks split in layers with
    states."""
    if model.experimental_attention_variant == "short_convolution":
        return "num_attention_heads"
    hybrid = model.hybrid_override_pattern is not None
    return "mamba_num_groups" if hybrid else "linear_num_key_heads"


def check_tensor_parallel(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check that tensor parallelism divides heads, inner features, vocabulary and tokens.

    Args:
        config: configuration that is asked for.
        parallel: its degrees, with every inferred one filled in.
        mistakes: collection to which every mistake is added.
    """
    model, training, tp = config.model, config.training, parallel.tensor_model_parallel_size
    for name, size in _split_over_tp(model):
        if size % tp:
            mistakes.add(
                f"tensor_model_parallel_size {tp} does not divide {name} {size}",
                f"{size} / {tp} = {size / tp:.4g}",
                works=[f"--tp {d}" for d in nearest(tp, tensor_parallel_sizes(model))],
            )
    for kv_heads in dict.fromkeys(own.num_kv_heads for own in model.attentions):
        if kv_heads % tp and tp % kv_heads:
            mistakes.add(
                f"{kv_heads} key/value heads are neither a multiple nor a divisor of tp {tp}",
                f"{kv_heads} / {tp} = {kv_heads / tp:.4g}, {tp} / {kv_heads} = {tp / kv_heads:.4g}",
                works=[f"--tp {d}" for d in nearest(tp, tensor_parallel_sizes(model))],
            )
    cp = parallel.context_parallel_size
    tokens = training.micro_batch_size * training.seq_length // cp
    if parallel.sequence_parallel and tokens % tp:
        shared = "" if cp == 1 else f" / cp {cp}"
        unit = 2 * tp * cp if cp > 1 else tp
        mistakes.add(
            f"sequence_parallel cannot split a microbatch's tokens over tp {tp}",
            f"micro_batch_size x seq_length{shared} = {tokens}, and {tokens} % {tp} = "
            f"{tokens % tp}",
            works=[f"--seq-length {-(-training.seq_length // unit) * unit}"],
        )


def check_tensor_overlap(parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check that messages of tensor-parallel ranks can be hidden behind their own products."""
    if parallel.tp_comm_overlap and not parallel.sequence_parallel:
        ranks = "--tensor-model-parallel-size 2 " * (parallel.tensor_model_parallel_size == 1)
        mistakes.add(
            "tp_comm_overlap hides the gathers and scatters of split tokens, and "
            "sequence_parallel is off",
            works=[f"{ranks}--sequence-parallel", "--no-tp-comm-overlap"],
        )


def check_experts(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check that expert parallelism divides the experts, and its mesh the ranks of a stage.

    Args:
        config: configuration that is asked for.
        parallel: its degrees, with every inferred one filled in.
        mistakes: collection to which every mistake is added.
    """
    model = config.model
    if model.num_experts is None:
        return
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    tp, inner = parallel.tensor_model_parallel_size, model.expert_ffn_size
    if model.num_experts % ep:
        mistakes.add(
            f"expert_model_parallel_size {ep} does not divide num_experts {model.num_experts}",
            f"{model.num_experts} / {ep} = {model.num_experts / ep:.4g}",
            works=[f"--ep {d}" for d in nearest(ep, divisors(model.num_experts))],
        )
    if inner % etp:
        mistakes.add(
            f"expert_tensor_parallel_size {etp} does not divide an expert's {inner} features",
            f"{inner} / {etp} = {inner / etp:.4g}",
            works=[f"--etp {d}" for d in nearest(etp, divisors(inner))],
        )
    _check_folding(model.num_experts, parallel, mistakes)
    if tp > 1 and not parallel.sequence_parallel:
        mistakes.add(
            f"experts with tp {tp} need sequence_parallel, or each of {tp} ranks would send the "
            "same tokens to the experts",
            works=["--sequence-parallel", "--tensor-model-parallel-size 1"],
        )
    if parallel.overlap_moe_expert_parallel_comm:
        _check_overlap(config, parallel, mistakes)
    halves = config.memory.modules_of_halves
    if halves and not parallel.overlap_moe_expert_parallel_comm:
        mistakes.add(
            f"recompute_modules {' '.join(halves)} recompute parts of the layers that "
            "overlap_moe_expert_parallel_comm interleaves, and it is off",
            works=["--overlap-moe-expert-parallel-comm", "--recompute-modules moe_act"],
        )


def _check_folding(num_experts: int, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check the expert mesh, which is laid over the same data, context and tensor ranks."""
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    axes = {
        "dp": parallel.data_parallel_size,
        "cp": parallel.context_parallel_size,
        "tp": parallel.tensor_model_parallel_size,
    }
    ranks = prod(axes.values())
    if ranks % (ep * etp) == 0:
        return
    product = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    fitting = [
        (e, x) for e in divisors(num_experts) for x in divisors(ranks) if ranks % (e * x) == 0
    ]
    closest = sorted(fitting, key=lambda c: (abs(c[1] - etp) / etp + abs(c[0] - ep) / ep, c))
    mistakes.add(
        f"ep {ep} x etp {etp} does not divide the ranks of a pipeline stage",
        f"{product} = {ranks}, and {ranks} / ({ep} x {etp}) = {ranks / (ep * etp):.4g}",
        works=[f"--ep {e} --etp {x}" for e, x in closest[:2]],
    )


def _check_overlap(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    name = "overlap_moe_expert_parallel_comm"
    if parallel.expert_model_parallel_size == 1:
        mistakes.add(
            f"{name} hides messages between expert-parallel ranks, and ep is 1",
            works=["--expert-model-parallel-size 2", "--no-overlap-moe-expert-parallel-comm"],
        )
    if parallel.moe_token_dispatcher_type == "allgather":
        mistakes.add(
            f"{name} hides all-to-alls, and moe_token_dispatcher_type is allgather",
            works=[f"--moe-token-dispatcher-type {kind}" for kind in ("alltoall", "flex")],
        )
    if config.memory.recompute_granularity == "full":
        mistakes.add(
            f"{name} interleaves a layer's forward with another's backward, which full "
            "recomputation starts with a forward of its own",
            works=["--recompute-granularity selective", "--recompute-granularity none"],
        )


def check_context(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Check that context parallelism divides tokens and heads, and how.

    Args:
        config: configuration that is asked for.
        parallel: its degrees, with every inferred one filled in.
        mistakes: collection to which every mistake is added.
    """
    model, cp = config.model, parallel.context_parallel_size
    kinds, sizes = parallel.cp_comm_type, parallel.hierarchical_context_parallel_sizes
    if len(kinds) not in (1, model.num_layers):
        mistakes.add(
            "cp_comm_type needs one way for all layers, or one for each",
            f"{len(kinds)} given, {model.num_layers} layers",
            works=[f"--cp-comm-type {kind}" for kind in dict.fromkeys(kinds) if kind != "a2a+p2p"],
        )
    two = len(sizes) == 2 and min(sizes) > 0
    if "a2a+p2p" in kinds and not (two and prod(sizes) == cp):
        product = " x ".join(map(str, sizes)) or "none"
        mistakes.add(
            "cp_comm_type a2a+p2p needs two hierarchical_context_parallel_sizes with the product "
            f"cp {cp}",
            product if len(sizes) < 2 else f"{product} = {prod(sizes)}",
            works=[
                f"--hierarchical-context-parallel-sizes {d} {cp // d}"
                for d in nearest(isqrt(cp), divisors(cp))
            ],
        )
    elif sizes and "a2a+p2p" not in kinds:
        mistakes.add(
            "hierarchical_context_parallel_sizes are for cp_comm_type a2a+p2p",
            works=["--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes none"],
        )
    if cp < 2:
        return
    length, unit = config.training.seq_length, 2 * cp
    if length % unit:
        near = (length // unit, length // unit + 1)
        mistakes.add(
            f"seq_length {length} does not split into 2 pieces for each of cp {cp} ranks",
            f"a rank has an early and a late piece, so that causal attention costs all the same: "
            f"{length} / (2 x {cp}) = {length / unit:.4g}",
            works=[f"--seq-length {n * unit}" for n in near if n],
        )
    tp = parallel.tensor_model_parallel_size
    keys = model.states.groups // tp
    if model.has_linear_layers and keys % cp:
        of = {
            "mamba_num_groups": "groups of Mamba-2",
            "linear_num_key_heads": "key heads of linear attention",
        }.get(_groups_setting(model), "groups of a short convolution's features")
        mistakes.add(
            f"{cp} context-parallel ranks cannot exchange tokens for {keys} {of}",
            f"{_groups_setting(model)} {model.states.groups} / tp {tp} = {keys}, and {keys} / "
            f"{cp} = {keys / cp:.4g}",
            works=[f"--cp {d}" for d in nearest(cp, divisors(max(keys, 1)))],
        )
    check_sparse_ranks(model, parallel, mistakes)
    if "a2a" in kinds:
        _check_heads(model, parallel, cp, lambda n: f"--cp {n}", mistakes)
    if "a2a+p2p" in kinds and two and prod(sizes) == cp:

        def sized(inner: int) -> str:
            return f"--hierarchical-context-parallel-sizes {inner} {cp // inner}"

        _check_heads(model, parallel, sizes[0], sized, mistakes, divisors(cp))


def _check_heads(
    model: ModelConfig,
    parallel: ParallelConfig,
    ranks: int,
    typed: Callable[[int], str],
    mistakes: Mistakes,
    among: Collection[int] | None = None,
) -> None:
    """Check that an exchange of heads for tokens gives each rank whole query heads.

    Args:
        model: model whose heads are exchanged.
        parallel: degrees; tensor parallelism splits the heads first.
        ranks: number of ranks that exchange heads.
        typed: function that gives the flags for another number of these ranks.
        mistakes: collection to which mistakes are added.
        among: possible numbers of these ranks; None: any.
    """
    tp = parallel.tensor_model_parallel_size
    heads = model.num_attention_heads // tp
    groups = dict.fromkeys(own.kv_heads_of(tp) for own in model.attentions)
    fitting = [
        d
        for d in divisors(max(heads, 1))
        if all(kv % d == 0 or d % kv == 0 for kv in groups) and (among is None or d in among)
    ]
    ring = "--cp-comm-type p2p"
    if parallel.hierarchical_context_parallel_sizes:
        ring += " --hierarchical-context-parallel-sizes none"
    works = [*(typed(d) for d in nearest(ranks, fitting)), ring]
    if heads % ranks:
        mistakes.add(
            f"{ranks} ranks cannot exchange tokens for {heads} query heads",
            f"{model.num_attention_heads} heads / tp {tp} = {heads}, and {heads} / {ranks} = "
            f"{heads / ranks:.4g}",
            works=works,
        )
        return
    for kv_heads in groups:
        if kv_heads % ranks and ranks % kv_heads:
            each = f"{kv_heads} / {ranks} = {kv_heads / ranks:.4g}"
            mistakes.add(
                f"{ranks} ranks cannot exchange tokens for {kv_heads} key/value heads",
                f"neither is a multiple of the other: {each}",
                works=works,
            )
