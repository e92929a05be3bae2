"""Splits a model into pipeline stages according to the settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.split import layout_language
from fivefold.pipeline.split.stages import Split, StageSpec, layout_string

CUTTING: Mapping[str, str] = MappingProxyType(
    {
        "num_virtual_stages_per_pipeline_rank": "virtual",
        "num_layers_per_virtual_pipeline_stage": "layers_per_virtual_stage",
        "pipeline_model_parallel_layout": "layout",
        "decoder_first_pipeline_num_layers": "first",
        "decoder_last_pipeline_num_layers": "last",
        "account_for_embedding_in_pipeline_split": "account_for_embedding",
        "account_for_loss_in_pipeline_split": "account_for_loss",
    }
)
"""Settings that cut the model into stages, and their names in `SplitSettings`."""
NOT_AUTO = tuple(name for name, own in CUTTING.items() if own not in ("virtual", "layout"))
"""Those that contradict the layout "auto", which decides how many layers each stage has."""
_FLAGS = MappingProxyType({own: flag_of(name) for name, own in CUTTING.items()})
_WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "virtual": ("virtual", "layers_per_virtual_stage"),
        "ends": ("first", "last"),
        "account": ("account_for_embedding", "account_for_loss"),
        "layout": ("layout",),
    }
)
"""The ways of splitting, each with its settings."""


def asks(value: object) -> bool:
    """Whether a value of one of `CUTTING` asks for a cut: any but None and False, 0 included."""
    return value is not None and value is not False


@dataclass(frozen=True)
class SplitSettings:
    """Megatron-LM's settings that split a model into pipeline stages.

    Attributes:
        num_layers: decoder layers of the model.
        pp: pipeline-parallel ranks.
        virtual: stages per rank (num_virtual_stages_per_pipeline_rank).
        layers_per_virtual_stage: layers per stage, an alternative to `virtual`.
        first: decoder layers on rank 0, over all its stages (decoder_first_pipeline_num_layers).
        last: decoder layers on the last rank (decoder_last_pipeline_num_layers).
        account_for_embedding: count the embedding as one layer when splitting evenly.
        account_for_loss: count the head and loss as one layer when splitting evenly.
        layout: the stages spelt out, in the language of `layout_language`.
        mtp_num_layers: multi-token prediction layers; without a layout they join the last stage.
        in_a_v: place the stages in a V instead of a loop, unless the layout says otherwise.
    """

    num_layers: int
    pp: int
    virtual: int | None = None
    layers_per_virtual_stage: int | None = None
    first: int | None = None
    last: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: str | None = None
    mtp_num_layers: int = 0
    in_a_v: bool = False

    def split(self) -> Split:
        """The stages, and their ranks.

        Raises:
            ConfigError: settings that conflict or do not add up.
        """
        _check_settings(self)
        if self.layout is not None:
            return _from_layout(self, self.layout)
        uneven = self.first is not None or self.last is not None
        counts = _uneven_counts(self) if uneven else _even_counts(self)
        place = v_placement if self.in_a_v else loop_placement
        return Split(_consecutive(counts, self.mtp_num_layers), place(self.pp, len(counts)))

    @property
    def unit(self) -> int:
        """The number that the layer count must be a multiple of for an even split."""
        return self.pp * (self.layers_per_virtual_stage or self.virtual or 1)

    def given(self) -> dict[str, list[str]]:
        """Flags that the user set, grouped by the way of splitting they belong to."""
        return {
            way: [_FLAGS[name] for name in names if asks(getattr(self, name))]
            for way, names in _WAYS.items()
        }


def _check_settings(settings: SplitSettings) -> None:
    """Check that numbers are positive and that ways of splitting are not mixed."""
    mistakes = Mistakes()
    for name, value in (
        ("--num-layers", settings.num_layers),
        ("--pipeline-model-parallel-size", settings.pp),
        ("--num-virtual-stages-per-pipeline-rank", settings.virtual),
        ("--num-layers-per-virtual-pipeline-stage", settings.layers_per_virtual_stage),
    ):
        if value is not None and value < 1:
            mistakes.add(f"{name} must be at least 1, not {value}")
    for name, value in (
        ("--decoder-first-pipeline-num-layers", settings.first),
        ("--decoder-last-pipeline-num-layers", settings.last),
    ):
        if value is not None and value < 0:
            mistakes.add(f"{name} must be at least 0, not {value}")
    given = settings.given()
    if len(given["virtual"]) > 1:
        mistakes.add(
            exclusive(given["virtual"]),
            "both set the stages per rank",
            works=[without([flag]) for flag in given["virtual"]],
        )
    if given["layout"]:
        others = [*given["virtual"], *given["ends"], *given["account"]]
        if others:
            mistakes.add(
                exclusive([*given["layout"], *others]),
                "the layout says it all",
                works=[without(others), without(given["layout"])],
            )
    elif given["ends"] and given["account"]:
        mistakes.add(
            exclusive([*given["ends"], *given["account"]]),
            "both make uneven ends",
            works=[without(given["account"]), without(given["ends"])],
        )
    if given["ends"] and settings.layers_per_virtual_stage is not None:
        mistakes.add(
            exclusive([*given["ends"], "--num-layers-per-virtual-pipeline-stage"]),
            "with uneven ends the stages of different ranks have different sizes",
            works=("--num-layers-per-virtual-pipeline-stage none",),
        )
    if given["ends"] and settings.pp == 1:
        mistakes.add(
            f"{_and(given['ends'])} needs more than one pipeline rank",
            works=("--pipeline-model-parallel-size 2", without(given["ends"])),
        )
    useful = settings.num_layers + 2  # one rank per layer, one for the embedding, one for the head
    if given["ends"] and settings.pp > useful:
        mistakes.add(
            f"{settings.pp} pipeline ranks are more than {settings.num_layers} layers can occupy",
            f"embedding + {settings.num_layers} layers + head = {useful}",
            works=[f"--pipeline-model-parallel-size {settings.num_layers}"],
        )
    mistakes.raise_if_any()


def without(flags: Sequence[str]) -> str:
    """Flags that undo the given flags."""
    return " ".join(
        f"--no-{flag[2:]}" if flag.startswith("--account") else f"{flag} none" for flag in flags
    )


def exclusive(flags: Sequence[str]) -> str:
    """That only one of these flags can be given."""
    return f"{_and(flags)} exclude each other"


def _and(words: Sequence[str]) -> str:
    return " and ".join(words)


def _from_layout(settings: SplitSettings, text: str) -> Split:
    pp = settings.pp
    parsed = layout_language.parse(text)
    groups = parsed.stages()
    mistakes = Mistakes()
    with mistakes.collecting():
        layout_language.check_rules(parsed, settings.num_layers, settings.mtp_num_layers)
    if len(groups) % pp:
        counts = range(pp, len(groups) + pp + 1, pp)
        sizes = [n for n in range(1, len(groups) + 1) if len(groups) % n == 0]
        whole = " | ".join(f"{n} stages" for n in _nearest(len(groups), counts))
        mistakes.add(
            f"pipeline layout: {len(groups)} stages cannot be laid over {pp} pipeline ranks",
            f"{len(groups)} % {pp} = {len(groups) % pp}; whole with {whole}, of which some may be "
            "empty",
            works=[f"--pipeline-model-parallel-size {n}" for n in _nearest(pp, sizes)],
        )
    mistakes.raise_if_any()
    words = ["".join(symbol.char for symbol in group) for group in groups]
    shape = parsed.shape or ("v" if settings.in_a_v else "loop")
    place = v_placement if shape == "v" else loop_placement
    layers = _ranges([word.count("t") for word in words])
    final = len(words) - 1
    stages = tuple(
        StageSpec(s == 0, layers[s], s == final, word.count("m")) for s, word in enumerate(words)
    )
    return Split(stages, place(pp, len(stages)))


def _even_counts(settings: SplitSettings) -> list[int]:
    """Layers of each stage: equal, except where the embedding or loss counts as a layer."""
    total = settings.num_layers + settings.account_for_embedding + settings.account_for_loss
    if total % settings.unit:
        raise ConfigError(_indivisible(settings, total))
    if settings.layers_per_virtual_stage is None:
        num_stages = settings.unit
    else:
        num_stages = total // settings.layers_per_virtual_stage
    counts = [total // num_stages] * num_stages
    counts[0] -= settings.account_for_embedding
    counts[-1] -= settings.account_for_loss
    return counts


def _indivisible(settings: SplitSettings, total: int) -> Mistake:
    """The error for `total` layers that do not divide evenly over the stages."""
    pp, unit, extra = settings.pp, settings.unit, total - settings.num_layers
    each = unit // pp
    kind, flag = "stages per rank", "--num-virtual-stages-per-pipeline-rank"
    if settings.layers_per_virtual_stage is not None:
        kind, flag = "layers per stage", "--num-layers-per-virtual-pipeline-stage"
    counted = f" + {extra} for embedding or loss" if extra else ""
    layers = range(unit - extra, settings.num_layers + unit + 1, unit)
    sizes = [n for n in range(1, total // each + 1) if total % (each * n) == 0]
    others = [n for n in range(1, total // pp + 1) if total % (pp * n) == 0 and each > 1]
    attempt = None
    if settings.layers_per_virtual_stage is None and unit <= settings.num_layers:
        share, rest = divmod(settings.num_layers, unit)
        balanced = _consecutive([share + (s < rest) for s in range(unit)], 0)
        given = settings.given()
        attempt = f"--pipeline-model-parallel-layout '{layout_string(balanced)}'"
        if given["virtual"] or given["account"]:
            attempt += f" {without([*given['virtual'], *given['account']])}"
    return Mistake(
        f"{settings.num_layers} layers{counted} do not split evenly over {pp} pipeline ranks "
        f"x {each} {kind}",
        (f"{total} % ({pp} x {each}) = {total % unit}",),
        (
            *(f"--num-layers {n}" for n in _nearest(settings.num_layers, layers)),
            *(f"--pipeline-model-parallel-size {n}" for n in _nearest(pp, sizes)),
            *(f"{flag} {n}" for n in _nearest(each, others)),
        ),
        attempt,
    )


def _uneven_counts(settings: SplitSettings) -> list[int]:
    """Layers of each stage if the first or last rank has its own number of layers."""
    pp, virtual = settings.pp, settings.virtual or 1
    ends = [n for n in (settings.first, settings.last) if n is not None]
    middle, ranks = settings.num_layers - sum(ends), pp - len(ends)
    taken = " - ".join(str(n) for n in ends)
    mistakes = Mistakes()
    for name, value in (("first", settings.first), ("last", settings.last)):
        if value is not None and value % virtual:
            mistakes.add(
                f"{value} layers on the {name} rank do not split over {virtual} stages per rank",
                f"{value} % {virtual} = {value % virtual}",
                works=[
                    f"--decoder-{name}-pipeline-num-layers {n}"
                    for n in _nearest(value, range(0, value + virtual + 1, virtual))
                ],
            )
    sum_line = f"{settings.num_layers} - {taken} = {middle}"
    if middle < 0 or (ranks == 0 and middle):
        mistakes.add(
            f"the ends hold {sum(ends)} layers, the model has {settings.num_layers}", sum_line
        )
    elif ranks and middle % (ranks * virtual):
        unit = ranks * virtual
        mistakes.add(
            f"{middle} layers do not split evenly over the other {ranks} ranks x {virtual} "
            "stages per rank",
            f"{sum_line}; {middle} % {unit} = {middle % unit}",
            works=[
                f"--num-layers {n + sum(ends)}"
                for n in _nearest(middle, range(0, middle + unit + 1, unit))
            ],
        )
    mistakes.raise_if_any()
    share = middle // ranks if ranks else 0
    per_rank = [share] * pp
    if settings.first is not None:
        per_rank[0] = settings.first
    if settings.last is not None:
        per_rank[-1] = settings.last
    there = [layers // virtual for layers in per_rank]
    back = there[::-1] if settings.in_a_v else there
    return [count for turn in range(virtual) for count in (back if turn % 2 else there)]


def _consecutive(counts: Sequence[int], mtp_num_layers: int) -> tuple[StageSpec, ...]:
    """Stages with `counts` layers each; embedding first, head and prediction layers last."""
    final = len(counts) - 1
    return tuple(
        StageSpec(s == 0, layers, s == final, mtp_num_layers if s == final else 0)
        for s, layers in enumerate(_ranges(counts))
    )


def _ranges(counts: Iterable[int]) -> list[tuple[int, ...]]:
    """Consecutive global layer indices: [2, 0, 1] -> [(0, 1), (), (2,)]."""
    ranges, start = [], 0
    for count in counts:
        ranges.append(tuple(range(start, start + count)))
        start += count
    return ranges


def _nearest(value: int, choices: Iterable[int]) -> list[int]:
    """The closest choice not above `value` and the closest above it, if they exist."""
    choices = list(choices)
    below = max((n for n in choices if 0 < n <= value), default=None)
    above = min((n for n in choices if n > value), default=None)
    return [n for n in (below, above) if n is not None]
