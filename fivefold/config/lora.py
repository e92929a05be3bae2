"""Names of the linear layers that may have adapters (LoRA), and of the settings of adapters."""

from typing import Literal

LoraTarget = Literal[
    "all-linear",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_xc",
    "in_proj_b",
    "out_proj",
]
OF_ADAPTERS = ("lora_alpha", "lora_target_modules", "use_rslora", "use_dora", "lora_dropout")
"""Settings that say something of adapters only."""
