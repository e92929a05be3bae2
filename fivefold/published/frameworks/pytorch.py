"""Trainers that shard by PyTorch's FSDP or XLA."""

from dataclasses import replace

from fivefold.published.frameworks.framework import OTHERS, Framework

# PyTorch's attention chose FlashAttention-2; linear layers are those of the model's code, and the
# model's ends are in the block around all others.
_EAGER = replace(
    OTHERS,
    attention="flash2",
    overlaps_backward_tp=False,
    joins_linears=False,
    waits_for_ends=True,
)
FSDP: tuple[Framework, ...] = (
    # Mixed precision reduces gradients in bf16 in these trainers (`reduce_dtype`).
    Framework(
        "fsdp",
        r"\bfsdp2?\b|\bhsdp\b|tinyllama|lit-?gpt|olmo|fairscale",
        software=replace(_EAGER, gradient_bytes=2.0),
        separate_loss=True,
        whole_attention=True,
    ),
    # PyTorch 2.11 ships a cuDNN whose attention it puts first on Hopper and Blackwell
    # (`check_prefer_cudnn_attention` in sdp_utils.cpp).
    Framework(
        "fsdp",
        "",
        (2026, 3),
        replace(_EAGER, attention="best", gradient_bytes=2.0),
        separate_loss=True,
        whole_attention=True,
    ),
)
# It builds models in bf16, so that weights and moments have that type. Tensor parallelism leaves
# the embedding whole, gathers the logits for `F.cross_entropy`, and gives each projection a plan of
# its own (`_build_block_tp_plan`); gradients are reduced in fp32 (`default_mp_policy`) in the last
# microbatch, and summed whole in that type until then (`maybe_no_sync`). Its GB are GiB
# (`get_memory_stats`), its PyTorch 2.11.
KEMPNER: tuple[Framework, ...] = (
    Framework(
        "kempnerforge",
        "kempner",
        software=replace(
            _EAGER,
            attention="best",
            gradient_bytes=4.0,
            whole_embedding=True,
            whole_logits=True,
            narrow_loss=True,
            gathers_each=True,
            reduces_last=True,
        ),
        separate_loss=True,
        whole_attention=True,
        gigabyte=2.0**30,
        held=(2.0, 2.0, 2.0, 4.0),
    ),
)
AUTOMODEL: tuple[Framework, ...] = (Framework("automodel", "automodel", software=OTHERS),)
MAXTEXT: tuple[Framework, ...] = (
    Framework("maxtext", "maxtext", software=OTHERS, whole_attention=True),
)
FOUNDRY: tuple[Framework, ...] = (
    Framework(
        "llm-foundry",
        "foundry|mosaic",
        software=replace(OTHERS, attention="flash1", fused=False),
        fused_loss=True,  # FlashAttention's, by default
        fp8_recipe="delayed",
        whole_attention=True,
    ),
)
