"""Compiles the Triton kernels that rehearsed steps launch, for a GPU that this machine need not
have: python -m tests.rehearse.compiled_kernels CAPABILITY [every]

A process of its own: where tests run, Triton interprets. Prints the names of what was compiled, and
raises Triton's error if a kernel is none: with `every`, all of them, and both sides of each branch;
otherwise, of small models and of the widest heads, those few in which each argument of a kernel has
each of its types and constants, fp16 apart.
"""

import sys
from collections import defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import type_canonicalisation_dict

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.mesh import device
from fivefold.model.eight_bit.fp8 import E4M3
from fivefold.model.eight_bit.rules import ADA
from fivefold.rehearse.roles import rehearsed_layout
from fivefold.rehearse.run import rehearse_rank

SHORT = {"seq_length": 128, "global_batch_size": 2}
SHARED_KIB = {75: 64, 80: 163, 89: 99, 90: 99, 100: 227, 120: 99}
"""Most shared memory of a block by compute capability (CUDA C++ Programming Guide, technical
specifications). 9.0 has 227, too; what is tested most often is held to the least since Ampere."""
MOST_PROGRAMS = 65_535
"""Of a grid along its second and third axis (the same)."""
ZEROPP = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
LLAMA = ZEROPP | {"cross_entropy_loss_fusion": True, "fused_residual_rmsnorm": True}
GPT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FEW_BITS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
STATES = FEW_BITS | {"exp_avg_sq_dtype": "fp8"}
REMAINDERS = FEW_BITS | {"exp_avg_dtype": "fp8", "store_param_remainders": True}
WITHOUT = FEW_BITS | {"main_params_dtype": "bf16", "main_grads_dtype": "bf16"}
LATENT = {"moe_layer_freq": "1", "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
EIGHT_BITS = {"precision": "bf16", "fp8_format": "e4m3"}
ONE_MORE = {"precision": "bf16", "apply_layernorm_1p": True, "qk_layernorm": True}
PART = {
    **{"rotary_percent": 0.5, "rotary_interleaved": True, "window_size": 20},
    **{"attention_dropout": 0.1, "label_smoothing": 0.1},
}
GIVEN = {"precision": "bf16", "check_for_nan_in_loss_and_grad": False}
MOMENTS = GIVEN | FEW_BITS | {"exp_avg_sq_dtype": "bf16", "main_grads_dtype": "bf16"}
KEYS = {"precision": "bf16", "context_parallel_size": 2, "attention_dropout": 0.1}
GATHERED = {
    "fp8_recipe": "tensorwise",
    "fp8_param_gather": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
CAPS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "cross_entropy_loss_fusion": True,
}
UNWEIGHTED = {"norm_elementwise_affine": False, "fused_residual_rmsnorm": True}
Steps = tuple[tuple[str, dict[str, Any]], ...]
WIDE: Steps = (
    *(("debug-llama", LLAMA | {"precision": p}) for p in ("bf16", "fp32")),
    *(("debug-gpt", GPT | {"precision": precision}) for precision in ("bf16", "fp32")),
    *(("debug-llama", {"precision": "bf16"} | given) for given in (STATES, REMAINDERS, WITHOUT)),
    ("debug-llama", {"precision": "fp64"} | STATES),
    *(("debug-llama", CAPS | {"precision": precision}) for precision in ("bf16", "fp32")),
    *(
        ("llama3-8b", GPT | {"precision": precision, "kv_channels": 256})
        for precision in ("bf16", "fp64")
    ),
)
SIZES: Steps = (
    ("llama3-405b", LLAMA | {"precision": "bf16"}),
    *(("gpt-1t", GPT | {"precision": precision}) for precision in ("bf16", "fp32")),
    *(("llama3-8b", GPT | {"precision": p, "kv_channels": 128}) for p in ("bf16", "fp64")),
    *(
        ("debug-deepseek-v3", LATENT | {"precision": precision, "attention_dropout": 0.1})
        for precision in ("bf16", "fp32", "fp64")
    ),
)
"""Further sizes of real models, which decide what tiles need."""
BRANCHES: Steps = (
    ("debug-llama", LLAMA | {"precision": "fp16"}),
    ("debug-llama", ONE_MORE | PART | {"cross_entropy_loss_fusion": True}),
    ("debug-llama", MOMENTS | {"activation_func": "quick_gelu"}),
    ("debug-llama", KEYS | {"activation_func": "gelu"}),
    ("debug-gpt-oss", {"precision": "bf16", "log_max_attention_logit": True}),
    ("debug-mixtral", UNWEIGHTED | {"precision": "bf16", "gated_linear_unit": False}),
)
"""What other steps leave out."""
NARROW: Steps = (
    ("debug-llama", EIGHT_BITS | GATHERED),
    *(
        ("debug-llama", EIGHT_BITS | {"fp8_recipe": recipe})
        for recipe in ("rowwise", "blockwise", "delayed", "mxfp8")
    ),
)
ONE_SIDED = {
    ("adamw_kernels._update", "keeps1"),  # the formats of moments
    ("adamw_kernels._update", "keeps2"),
    ("quantised_kernels._pack", "powers"),  # what `verify` compares with
}
"""Branches of which every step takes the same side."""
Compiled = tuple[Any, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]


def type_of(argument: Any) -> str:
    """As Triton specialises it: of an integer that is 1 its value is compiled in."""
    if isinstance(argument, torch.Tensor):
        return "*" + type_canonicalisation_dict[str(argument.dtype).removeprefix("torch.")]
    if isinstance(argument, bool):
        return "u1"
    if isinstance(argument, int):
        return "constexpr" if argument == 1 else "i32" if argument < 2**31 else "i64"
    return "constexpr" if argument is None else "fp32"


def launched(steps: Steps, layers: int) -> list[Compiled]:
    """The kernels of some steps of so many layers, with the types of what they get, and
    constants."""
    found: dict[Compiled, None] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        assert all(side <= MOST_PROGRAMS for side in grid[1:]), (kernel.__name__, grid)
        arguments = dict(zip(kernel.arg_names, given, strict=False)) | constants
        constant = {p.name for p in kernel.params if p.is_constexpr} | set(constants)
        types = {
            name: "constexpr" if name in constant else type_of(value)
            for name, value in arguments.items()
        }
        known = {name: v for name, v in arguments.items() if types[name] == "constexpr"}
        of_kernel = {n: t for n, t in types.items() if n in kernel.arg_names}
        found[kernel, tuple(of_kernel.items()), tuple(known.items())] = None

    device.launch = launch
    from fivefold.model.kernels import quantise  # which takes it from there

    for model, settings in steps:
        config = Config(resolve_model(model)).with_values(num_layers=layers, **SHORT, **settings)
        rehearse_rank(rehearsed_layout(check(config, 2)), 0)
    if steps[-1] in NARROW:  # what only a GPU's own 8-bit products ask for
        quantise.by_rows(torch.empty(256, 128, dtype=E4M3).t())
    return [*found]


def few_of(found: list[Compiled]) -> list[Compiled]:
    """As few as are found soon, in which each argument of a kernel is all that it ever is."""
    left = {each: {(each[0], *said) for part in each[1:] for said in part} for each in found}
    chosen = []
    while any(left.values()):
        most = max(left, key=lambda each: len(left[each]))
        chosen.append(most)
        seen = left.pop(most)
        left = {each: said - seen for each, said in left.items()}
    return chosen


def one_sided(found: list[Compiled]) -> set[tuple[str, str]]:
    """Branches of kernels, by constants, of which one side is never compiled."""
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for kernel, types, constants in found:
        module, known = kernel.__module__.rpartition(".")[2], dict(constants)
        for name, _ in types:
            values[f"{module}.{kernel.__name__}", name].append(known.get(name, "given"))
    branches = {
        of: {bool(value) for value in given}
        for of, given in values.items()
        if any(value is None or isinstance(value, bool) for value in given)
    }
    return {of for of, sides in branches.items() if len(sides) == 1} - ONE_SIDED


def main(capability: int, *, every: bool) -> None:
    """Compile for GPUs of a compute capability, such as 90."""
    target, names = GPUTarget("cuda", capability, 32), set()
    wide = BRANCHES + WIDE + SIZES if every else WIDE
    steps = wide if divmod(capability, 10) < ADA else wide + NARROW
    found = launched(steps, layers=2 if every else 1)  # one layer shows each type of each argument
    assert not (every and one_sided(found)), one_sided(found)
    for kernel, types, constants in found if every else few_of(found):
        known = {name: value for name, value in constants if name in kernel.arg_names}
        chosen = {name: value for name, value in constants if name not in known}
        source = ASTSource(kernel, signature=dict(types), constexprs=known)
        compiled = compile(source, target=target, options={**device.TRITON, **chosen})
        assert compiled.asm["cubin"]
        needed = compiled.metadata.shared / 1024
        runs = capability >= 80 or not kernel.__module__.endswith("kernels.attention")
        assert not runs or needed <= SHARED_KIB[capability], (needed, known)
        names.add(kernel.__name__)
    print(*sorted(names))


if __name__ == "__main__":
    main(int(sys.argv[1]), every="every" in sys.argv)
