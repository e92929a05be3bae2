"""What a plan says, as text."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from fivefold.check import Layout
from fivefold.model.shape import count_parameters
from fivefold.plan.memory_choices import describe
from fivefold.plan.search import Candidate, Result
from fivefold.plan.step import Prediction, precision_of
from fivefold.units import human_bytes, human_count, human_flops, human_seconds

WIDTH = 100
ZERO = {
    "no_shard": "-",
    "optim": "ZeRO-1",
    "optim_grads": "ZeRO-2",
    "optim_grads_params": "ZeRO-3",
}
CONVENTION = (
    "MFU is model FLOPs (6 per matmul parameter and token with the output layer, causal attention "
    "counted once, none for recomputation) over the peak of the data sheet"
)


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows of cells as lines of aligned columns; those numbered in `right` end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(width) if column in flush else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def degrees(layout: Layout) -> str:
    """The mesh in a few words: 'tp 8 pp 16 dp 128'."""
    grid = layout.grid
    sizes = {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "ep": grid.ep, "etp": grid.etp}
    words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " ".join([*words, f"dp {grid.dp}"])


def summary(layout: Layout) -> str:
    """A layout in one line."""
    parallel, training = layout.config.parallel, layout.config.training
    words = [degrees(layout), f"micro-batch {training.micro_batch_size}"]
    if layout.grid.pp > 1:
        virtual = layout.split.num_virtual
        words.append(f"{layout.schedule}" + (f" x {virtual} stages" if virtual > 1 else ""))
    strategy = ZERO[parallel.data_parallel_sharding_strategy]
    if strategy != "-":
        copies = parallel.num_distributed_optimizer_instances
        words.append(strategy + (f" in {copies} groups" if copies > 1 else ""))
    words += memory_words(layout)
    return ", ".join(words)


def memory_words(layout: Layout) -> list[str]:
    """The memory techniques, if any."""
    memory = layout.config.memory
    words = []
    if memory.recompute_granularity is not None:
        words.append(describe(memory))
    if memory.fine_grained_activation_offloading:
        words.append(f"offload {' '.join(memory.offload_modules)}")
    if memory.cross_entropy_loss_fusion:
        words.append(f"fused loss ({memory.cross_entropy_fusion_impl})")
    if memory.optimizer_cpu_offload:
        words.append("optimizer on the host")
    return words


def ranked(candidates: Sequence[Candidate]) -> list[str]:
    """The table of layouts, a line each."""
    head = ("", "tp", "cp", "pp", "ep", "dp", "mbs", "schedule", "shards", "memory saved by")
    rows = [(*head, "memory", "step", "MFU", "tokens/s/GPU")]
    for number, candidate in enumerate(candidates, 1):
        layout, grid = candidate.layout, candidate.layout.grid
        prediction = candidate.prediction
        assert prediction is not None
        parallel = layout.config.parallel
        virtual = layout.split.num_virtual
        schedule = "-" if grid.pp == 1 else layout.schedule + (f" x{virtual}" * (virtual > 1))
        copies = parallel.num_distributed_optimizer_instances
        shards = ZERO[parallel.data_parallel_sharding_strategy] + (f" /{copies}" * (copies > 1))
        expert = f"{grid.ep}" + (f"x{grid.etp}" * (grid.etp > 1))
        rows.append(
            (
                f"{number}",
                f"{grid.tp}",
                f"{grid.cp}",
                f"{grid.pp}",
                expert,
                f"{grid.dp}",
                f"{layout.config.training.micro_batch_size}",
                schedule,
                shards,
                ", ".join(memory_words(layout)) or "-",
                human_bytes(candidate.memory.device_total),
                human_seconds(prediction.step_time),
                f"{prediction.mfu:.1%}",
                f"{prediction.tokens_per_second_per_gpu:,.0f}",
            )
        )
    return table(rows, right=(0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13))


def waterfall(prediction: Prediction) -> list[str]:
    """From the ideal time of a step to the predicted one."""
    total = prediction.step_time
    rows = [("", "seconds", "share", "")]
    for part in prediction.parts:
        if abs(part.seconds) >= 5e-4 * total:
            bar = "#" * round(40 * abs(part.seconds) / total)
            rows.append(
                (part.name, human_seconds(part.seconds), f"{part.seconds / total:.1%}", bar)
            )
    rows.append(("step", human_seconds(total), "100.0%", ""))
    return table(rows, right=(1, 2))


def memory_table(candidate: Candidate) -> list[str]:
    """What each pipeline rank's peak is made of; equal neighbours share a line."""
    ranks = candidate.memory.ranks
    names = list(dict.fromkeys(name for rank in ranks for name in rank.parts))
    rows = [("rank", *names, "peak", "when")]
    shown: list[tuple[str, ...]] = []
    first = 0
    for number, rank in enumerate(ranks):
        cells = tuple(human_bytes(rank.parts.get(name, 0.0)) for name in names)
        row = (*cells, human_bytes(rank.peak), rank.act if rank.act else rank.phase)
        if shown and shown[-1] == row[:-1]:
            rows[-1] = (f"{first}-{number}", *rows[-1][1:])
            continue
        first = number
        shown.append(row[:-1])
        rows.append((f"{number}", *row))
    return table(rows, right=range(len(names) + 2))


def counts(result: Result) -> str:
    """How much was searched, and what is left to be found."""
    kept = result.legal - result.too_large
    return (
        f"{result.legal:,} legal layouts: {result.too_large:,} too large by their lower bound, "
        f"{kept:,} bounded in time, {result.looked_at:,} looked at closely; none of the others can "
        f"be more than {result.gap:.1%} faster; {human_seconds(result.seconds)}"
    )


def question(result: Result) -> Iterator[str]:
    """What was asked, assumptions included."""
    request = result.request
    model, training, cluster = request.config.model, request.config.training, request.cluster
    whole = count_parameters(model).total
    active = count_parameters(model, active=True).total
    of_them = "" if active == whole else f", {human_count(active)} of them active"
    yield f"model      {human_count(whole)} parameters{of_them}, {model.num_layers} layers"
    nodes = -(-request.world // cluster.gpus_per_node)
    yield (
        f"cluster    {request.world:,} x {cluster.gpu.name} "
        f"({human_bytes(cluster.gpu.memory_bytes)}), {nodes:,} nodes of {cluster.gpus_per_node}, "
        f"{human_bytes(cluster.node_link.bandwidth)}/s inside, "
        f"{human_bytes(cluster.network_link.bandwidth)}/s a GPU between"
    )
    tokens = training.global_batch_size * training.seq_length
    yield (
        f"step       {training.global_batch_size:,} sequences of {training.seq_length:,} tokens = "
        f"{human_count(tokens)} tokens, {training.precision}"
        + (f" with {training.fp8_format} fp8" if training.fp8_format else "")
    )
    for what in request.assumed:
        yield f"assumed    {what}"
    for name, value in sorted(request.fixed().items()):
        yield f"fixed      {name} = {value}"


def best(result: Result) -> Iterator[str]:
    """The recommended layout, with its time, its memory and where the time goes."""
    candidate = result.best
    prediction = candidate.prediction
    assert prediction is not None
    gpus = candidate.layout.grid.world_size
    yield f"{summary(candidate.layout)}"
    yield (
        f"step {human_seconds(prediction.step_time)} "
        f"(80 % between {human_seconds(prediction.low)} and {human_seconds(prediction.high)}), "
        f"{prediction.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, "
        f"{human_flops(prediction.model_flops / prediction.step_time / gpus)}/s a GPU = "
        f"{prediction.mfu:.1%} of the {precision_of(candidate.layout)} peak"
    )
    yield from wrap(CONVENTION, WIDTH)
