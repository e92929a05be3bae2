"""LongRoPE and dynamic NTK, which choose by the length of rows, against one device."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.counts.derived import describe
from fivefold.errors import ConfigError
from tests.verify.cases import LLAMA, LONG, chosen, config, flags, named
from tests.verify.test_layouts import passes

PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
UNLISTED = dict.fromkeys(("longrope_short_factor", "longrope_long_factor"), ()) | {
    "rope_type": "dynamic",
    "rotary_scaling_factor": 3.0,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tokens split": (2, flags(tp=2, sequence=True)),
    "ring, documents": (2, named(cp=2, cp_comm_type=("p2p",)) | PACKED),
    "slices of sequences, stages": (
        2,
        flags(pp=2, stages="Et|t*2L")
        | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2},
    ),
    "ZeRO-3, all again": (
        2,
        flags(dp=2, strategy="optim_grads_params") | {"recompute_granularity": "full"},
    ),
    "dynamic, slices of sequences, stages": (
        2,
        flags(pp=2, stages="Et|t*2L")
        | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2}
        | UNLISTED,
    ),
    "dynamic, documents": (2, named(cp=2, cp_comm_type=("p2p",)) | PACKED | UNLISTED),
    "short rows": (2, flags(tp=2, sequence=True) | {"original_max_position_embeddings": 16}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, "slices of sequences, stages"))
def test_layouts_turn_by_the_factors_of_whole_rows(name: str) -> None:
    """Also where a rank, a slice or a document has fewer tokens than choose the long ones."""
    world, settings = LAYOUTS[name]
    passes(world, "llama", LONG | settings, steps=1)


@pytest.mark.parametrize(("length", "which"), [(12, "short"), (13, "long")])
def test_a_run_says_which_factors_it_turns_by(length: int, which: str) -> None:
    rows = describe(check(config(LLAMA, **LONG, seq_length=length), 1))
    assert next(value for name, value, _ in rows if name == "rotary factors") == which


@pytest.mark.parametrize(("length", "base"), [(12, "10000"), (18, "39528.5")])
def test_a_run_says_its_base(length: int, base: str) -> None:
    """12 of 18 tokens are one length and a half: 10,000 x (3 x 1.5 - 2) ^ (6 / 4) ."""
    rows = describe(check(config(LLAMA, **LONG | UNLISTED, seq_length=length), 1))
    assert next(value for name, value, _ in rows if name == "rotary base") == base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"longrope_long_factor": (1.0, 2.0)}, "longrope_long_factor needs a number for each of 3"),
        ({"longrope_short_factor": (1.0, 0.0, 1.0)}, "longrope_short_factor must be positive"),
        ({"use_rope_scaling": True}, "rope_type longrope and use_rope_scaling both"),
        ({"rotary_seq_len_interpolation_factor": 2.0}, "rope_type longrope and rotary_seq"),
        ({"original_max_position_embeddings": 1}, "works: --longrope-attention-factor 1.0"),
        ({"rope_type": "rope"}, "longrope_short_factor"),
        ({"position_embedding_type": "learned_absolute"}, "rope_type longrope needs"),
        (UNLISTED | {"kv_channels": 2}, "dynamic needs more than one rotary feature pair"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(LLAMA, **LONG | changes), 1)
