"""Megatron-LM, by year: what its defaults and its published scripts turned on when."""

from dataclasses import replace

from fivefold.published.frameworks.framework import OTHERS, Framework

CORE = replace(OTHERS, waits_for_hops="plain")
"""Megatron since 2023: computation beside a pipeline's messages (`overlap_p2p_comm`), which it has
for interleaved stages only (`schedules.py`, `p2p_communication.py`)."""
# Narayanan et al. (2021): scores in memory, messages of a pipeline in shares, nothing overlapped.
_EARLY = replace(OTHERS, attention="scores", scatters_hops=True, waits_for_hops="always")
# --use-flash-attn (January 2023): the first FlashAttention. overlap_p2p_comm came in spring.
_FLASH = Framework(
    "megatron",
    "",
    (2023,),
    replace(OTHERS, attention="flash1", waits_for_hops="always"),
    overlaps=(),
)
MEGATRON: tuple[Framework, ...] = (
    Framework(
        "megatron",
        r"megatron(?!-?deepspeed|-?bridge|-?swift)",
        software=replace(_EARLY, overlaps_backward_tp=False),
        sequence_parallel=False,
        shards=0,
        overlaps=(),
    ),
    # Korthikanti et al. (2022): sequence parallelism, and dX reduced beside dW.
    Framework(
        "megatron",
        "",
        (2022,),
        _EARLY,
        sequence_parallel=False,
        shards=0,
        overlaps=(),
    ),
    _FLASH,
    # FlashAttention-2 (July 2023); --overlap-grad-reduce came with core 0.3, in the summer, and
    # --overlap-param-gather with core 0.4, in autumn.
    replace(_FLASH, since=(2023, 7), software=replace(CORE, attention="flash2")),
    # Its scripts of 2024 turn on all overlaps, in tensor parallelism, too.
    Framework("megatron", "", (2023, 11), CORE),
)
CORE_RELEASES = {4: (2023, 11), 7: (2024, 6), 9: (2024, 10), 12: (2025, 5), 14: (2025, 10)}
"""Year and month of releases core_r0.N."""
