"""Checks that a step can be recorded as a CUDA graph and replayed; torch-free."""

from collections.abc import Iterator

from fivefold.config.config import Config
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes

NAME = "cuda_graph_impl = local"
OFF = "--cuda-graph-impl none"
_MOVES = (
    "optimizer_cpu_offload",
    "offload_optimizer_states",
    "param_cpu_offload",
    "fine_grained_activation_offloading",
)


def check_step_graph(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report anything but tokens that differs from step to step, or needs the host within one.

    Args:
        config: the configuration.
        parallel: its degrees, inferred.
        mistakes: where it is reported.
    """
    if config.training.cuda_graph_impl is None:
        return
    for what, works in (*_of_the_model(config), *_of_the_run(config, parallel)):
        mistakes.add(f"{NAME} replays what one step has launched, and {what}", works=[*works, OFF])


def check_graph_device(config: Config, device_type: str, *, shared: bool) -> None:
    """Refuse to start ranks on devices where no step can be recorded.

    Args:
        config: the configuration.
        device_type: where the ranks will compute, "cuda" or "cpu".
        shared: whether ranks share GPUs.

    Raises:
        ConfigError: all that is in the way.
    """
    if config.training.cuda_graph_impl is None:
        return
    mistakes = Mistakes()
    if device_type != "cuda":
        what = f"{NAME} records the work of a GPU, and the device is {device_type}"
        mistakes.add(what, works=[OFF])
    if shared:
        what = f"{NAME}: ranks that share a GPU send through the host, which a graph cannot"
        mistakes.add(what, works=[OFF])
    mistakes.raise_if_any()


def _of_the_model(config: Config) -> Iterator[tuple[str, list[str]]]:
    """What the model needs the host for in every step, and the flags that avoid it."""
    model = config.model
    if model.has_linear_layers:
        yield (
            "layers with linear attention, short convolutions or Mamba-2 find their chunks on the "
            "host",
            [],
        )
    if config.data.reset_attention_mask:
        yield (
            "with reset_attention_mask attention is launched for documents, whose number and "
            "lengths differ in each",
            ["--no-reset-attention-mask"],
        )
    if model.attention_chunk_size is not None:
        yield (
            f"where chunks of {model.attention_chunk_size} tokens begin "
            "(attention_chunk_size) comes from the host in each",
            ["--attention-chunk-size none"],
        )
    dropout = {"hidden_dropout": model.hidden_dropout, "attention_dropout": model.attention_dropout}
    if model.embedding_dropout is not None:
        dropout["embedding_dropout"] = model.embedding_dropout
    if model.lora_rank is not None:
        dropout["lora_dropout"] = model.lora_dropout
    for name, p in dropout.items():
        if p:
            yield (
                f"{name} = {p:g} takes another key for its masks from the host in each",
                [f"{flag_of(name)} 0"],
            )
    if model.num_experts is not None:
        yield (
            f"the number of rows that reach each of {model.num_experts} experts differs in each, "
            "which the host must know",
            [],
        )


def _of_the_run(config: Config, parallel: ParallelConfig) -> Iterator[tuple[str, list[str]]]:
    """What of the run reaches into the recorded part, and the flags that avoid it."""
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    if pp > 1:
        yield (
            f"pipeline ranks (pp {pp}) wait for each other's messages within a step, which has "
            "not been recorded yet",
            ["--pipeline-model-parallel-size 1"],
        )
    if parallel.tp_comm_overlap and tp > 1:
        yield (
            "tp_comm_overlap sends by memory and streams that ranks share, which has not been "
            "recorded yet",
            ["--no-tp-comm-overlap"],
        )
    if parallel.overlap_param_gather_with_optimizer_step:
        yield (
            "with overlap_param_gather_with_optimizer_step it would begin before the step does, "
            "with gathers",
            ["--no-overlap-param-gather-with-optimizer-step"],
        )
    for name in _MOVES:
        if getattr(config.memory, name):
            yield (
                f"{name} copies to the host within a step, where the host takes part",
                [flag_of(f"no_{name}")],
            )
    if config.logging.log_straggler:
        yield (
            "log_straggler takes the time of each act of it, which a replay does not tell",
            ["--no-log-straggler"],
        )
