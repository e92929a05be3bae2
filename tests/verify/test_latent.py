"""Latent attention in every layout computes what one device computes, and does what theory says."""

from pathlib import Path

import pytest

from tests.verify.cases import chosen, flags
from tests.verify.families import (
    BUBBLES,
    DROP,
    MOVED,
    Case,
    computes_what_one_device_does,
    context,
    does_what_theory_says,
    selective,
)

CASES: dict[str, Case] = {
    "alone": (1, "latent", flags()),
    "tensor parallel": (2, "latent", flags(tp=2)),
    "tensor parallel, dropout": (2, "latent", flags(tp=2) | DROP),
    "sequence parallel": (4, "latent", flags(tp=4, sequence=True)),
    "plain queries, tensor parallel": (2, "latent, plain queries", flags(tp=2) | DROP),
    "plain queries, sequence parallel": (2, "latent, plain queries", flags(tp=2, sequence=True)),
    "p2p": (2, "latent", flags() | context(2, "p2p") | DROP),
    "all_gather": (2, "latent", flags() | context(2, "all_gather") | DROP),
    "a2a": (2, "latent", flags() | context(2, "a2a") | DROP),
    "a2a+p2p": (4, "latent", flags() | context(4, "a2a+p2p")),
    "gathered latents, sequence parallel": (
        4,
        "latent, plain queries",
        flags(tp=2, sequence=True) | context(2, "all_gather"),
    ),
    "gathered latents, tensor parallel, window": (
        4,
        "latent",
        flags(tp=2) | context(2, "all_gather") | {"window_size": 3},
    ),
    "gathered latents, attention recomputed, ZeRO-3": (
        4,
        "latent",
        flags(dp=2, strategy="optim_grads_params")
        | context(2, "all_gather")
        | selective("core_attn"),
    ),
    "gathered latents, deferred weights": (
        8,
        "latent",
        flags(tp=2, pp=2, sequence=True) | context(2, "all_gather") | BUBBLES,
    ),
    "kinds by layer": (
        2,
        "latent",
        flags() | context(2, "p2p", "all_gather", "a2a"),
    ),
    "ring, window, sequence parallel": (
        4,
        "latent",
        flags(tp=2, sequence=True) | context(2, "p2p") | {"window_size": 3},
    ),
    "window": (1, "latent", flags() | {"window_size": 3}),
    "ZeRO-3": (2, "latent", flags(dp=2, strategy="optim_grads_params")),
    "HSDP": (4, "latent", flags(dp=4, strategy="optim_grads", replicas=2)),
    "deferred weights": (2, "latent", flags(pp=2) | BUBBLES),
    "deferred weights, sequence parallel, plain queries": (
        4,
        "latent, plain queries",
        flags(tp=2, pp=2, sequence=True) | BUBBLES,
    ),
    "layers recomputed": (
        4,
        "latent",
        flags(tp=2, sequence=True, dp=2) | {"recompute_granularity": "full"},
    ),
    "every module": (
        2,
        "latent",
        flags(tp=2, sequence=True) | selective("core_attn", "mlp", "layernorm", "mla_up_proj"),
    ),
    "heads made again": (1, "latent", flags() | selective("mla_up_proj")),
    "heads made again, ZeRO-3, plain queries, dropout": (
        2,
        "latent, plain queries",
        flags(dp=2, strategy="optim_grads_params") | selective("mla_up_proj") | DROP,
    ),
    "heads made again, ring, deferred weights": (
        8,
        "latent",
        flags(tp=2, pp=2, sequence=True)
        | context(2, "p2p")
        | selective("mla_up_proj", "mlp")
        | BUBBLES,
    ),
    "moved": (2, "latent", flags(tp=2) | MOVED),
    "gathered latents, moved": (2, "latent", flags() | context(2, "all_gather") | MOVED),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "alone",
        "p2p",
        "heads made again, ZeRO-3, plain queries, dropout",
    ),
)
def test_layouts(case: str) -> None:
    computes_what_one_device_does(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, *list(CASES)[::8]))
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    does_what_theory_says(CASES[case], tmp_path)
