"""DeepSpeed's engine, and trainers on it."""

from dataclasses import replace
from types import MappingProxyType

from fivefold.config.config import Config
from fivefold.pipeline.split.stages import layout_of_counts
from fivefold.published.frameworks.framework import OTHERS, Framework


def by_blocks(config: Config, stages: int) -> str:
    """The layout of stages that are filled one after the other with as many layers as the fullest
    needs (`partition_method` "type:transformer"), or, where only so all are equal, of stages whose
    first and last have one fewer ("type:transformer|embedding")."""
    layers = config.model.num_layers
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return layout_of_counts([each - 1, *[each] * (stages - 2), each - 1])
    each = -(-layers // stages)
    return layout_of_counts([max(0, min(each, layers - s * each)) for s in range(stages)])


# `allreduce_and_scatter` in its stage_1_and_2.py; gradients of microbatches are added by kernels of
# their own; its pipelines wait for their messages.
_ENGINE = replace(
    OTHERS,
    gathers_to_recompute=True,
    reduces_whole=True,
    accumulates_apart="always",
    waits_for_hops="always",
)
# In June 2021 ZeRO-3 took 0.42 s of a forward to gather 10 GB inside a machine with NVLink (its
# issue 1174).
_GATHER_2021 = 10e9 / 0.42
_FP16 = (2.0, 2.0, 4.0, 8.0)  # its gradients have the weights' type
MEGATRON_DEEPSPEED: tuple[Framework, ...] = (
    Framework(
        "megatron-deepspeed",
        r"megatron-?deepspeed|neox|pythia|bloom|bigscience|mt-nlg|glm-130b",
        software=replace(
            _ENGINE, attention="scores", gather_rate=_GATHER_2021, overlaps_backward_tp=False
        ),
        sequence_parallel=False,
        overlaps=(),
        divide=by_blocks,
        held=_FP16,
    ),
    # With Megatron-LM's dX reduced beside dW; activations and their gradients are sent in shares
    # (`is_pipe_partitioned`, `is_grad_partitioned` of its pipe/engine.py; earlier, not the latter).
    Framework(
        "megatron-deepspeed",
        "",
        (2022,),
        replace(_ENGINE, attention="scores", scatters_hops=True),
        sequence_parallel=False,
        overlaps=(),
        divide=by_blocks,
        held=_FP16,
    ),
)
DEEPSPEED: tuple[Framework, ...] = (
    replace(MEGATRON_DEEPSPEED[0], name="deepspeed", mark="deepspeed|zero-?3 of deepspeed"),
    # Parameters are gathered ahead of their layers (its prefetching of 2022).
    Framework(
        "deepspeed",
        "",
        (2022, 6),
        replace(_ENGINE, attention="flash2"),
        overlaps=(),
    ),
)
XTUNER: tuple[Framework, ...] = (
    replace(
        DEEPSPEED[-1],
        name="xtuner",
        mark="xtuner",
        since=(),
        settings=MappingProxyType({"cp_comm_type": ("a2a",)}),  # DeepSpeed-Ulysses
    ),
)
