"""The layouts that are measured. Imports no torch."""

from dataclasses import dataclass

CLIP = 1.0  # norm to which every system clips the gradients of a step, as recipes do


@dataclass(frozen=True)
class Row:
    """One layout: degrees of parallelism, and what data-parallel ranks shard.

    Attributes:
        name: how --rows and the results file call it.
        label: how the table calls it.
        dp, tp, pp: data-, tensor- and pipeline-parallel degrees; their product is the ranks.
        zero: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters (FSDP).
        sp: sequence parallelism on the tensor-parallel ranks.
        ep: ranks that split the experts of every layer; None: dense MLPs.
    """

    name: str
    label: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sp: bool = False
    ep: int | None = None

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


ROWS = {
    row.name: row
    for row in (
        Row("one", "1 rank"),
        Row("dp2", "DP2", dp=2),
        Row("zero1", "ZeRO-1, 2 ranks", dp=2, zero=1),
        Row("zero2", "ZeRO-2, 2 ranks", dp=2, zero=2),
        Row("fsdp2", "FSDP2 / ZeRO-3, 2 ranks", dp=2, zero=3),
        Row("tp2", "TP2", tp=2),
        Row("tp2sp", "TP2 + SP", tp=2, sp=True),
        Row("pp2", "PP2 1F1B", pp=2),
        Row("dp4", "DP4", dp=4),
        Row("fsdp4", "FSDP4", dp=4, zero=3),
        Row("tp4", "TP4", tp=4),
        Row("tp4sp", "TP4 + SP", tp=4, sp=True),
        Row("pp4", "PP4 1F1B", pp=4),
        Row("dp2tp2", "DP2 x TP2", dp=2, tp=2),
        Row("tp2pp2", "TP2 x PP2", tp=2, pp=2),
        Row("dp2pp2", "DP2 x PP2", dp=2, pp=2),
        Row("dp2tp2pp2", "2 x 2 x 2", dp=2, tp=2, pp=2),
    )
}

EXPERT_ROWS = {
    row.name: row
    for row in (
        Row("moe", "1 rank", ep=1),
        Row("ep2", "EP2", dp=2, ep=2),
        Row("ep4", "EP4", dp=4, ep=4),
        Row("ep2pp2", "EP2 x PP2 1F1B", dp=2, pp=2, ep=2),
        Row("ep2tp2", "EP2 x TP2 + SP, 2 ranks", tp=2, ep=2, sp=True),
    )
}
