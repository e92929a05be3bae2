"""Operations that megatron-core launches for the forward of a layer with experts, by its parts.

    python -m benchmarks.megatron_operations

It needs megatron-core 0.16.1 (`pip install --no-deps megatron-core==0.16.1`). One of two
expert-parallel ranks runs on a CPU, the other is pretended, and all-to-alls count as an operation
each. Views and allocations launch nothing. On a GPU the host copies four tensors of counts, too
(`_maybe_dtoh_and_synchronize`), and fused kernels permute. `fivefold/predict/times/layer.py` has
the router, the preparation and the exchange.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core compiles some functions when imported

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.peer_systems import megatron_cpu  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from benchmarks.peer_systems.megatron_parts import LLAMA, llama_layers
from fivefold.rehearse.world import pretended_world

EXPERTS, TOKENS, HIDDEN = 16, 32, 64
# Names of operations that make no kernel.
FREE = frozenset(
    [
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "permute",
        "split",
        "split_with_sizes",
        "as_strided",
        "unbind",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
    ]
)
PARTS = {
    "dispatch_preprocess": "exchange",
    "token_dispatch": "exchange",
    "dispatch_postprocess": "exchange",
    "combine_preprocess": "exchange",
    "token_combine": "exchange",
    "combine_postprocess": "exchange",
    "preprocess": "preparation",
}


class Counted(TorchDispatchMode):
    """Counts operations by the part of the layer that launches them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.parts = ["attention and norms"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.partition("::")[2] not in FREE:
            self.found[self.parts[-1]] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        self.parts.append(part)
        yield
        self.parts.pop()

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count what a method launches as that of a part."""
        plain = getattr(owner, method)

        @wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return plain(*args, **kwargs)

        setattr(owner, method, watched)


def arrives(counted: Counted) -> Callable[..., torch.Tensor]:
    """An all-to-all that is an operation, and brings as many rows as it would."""

    def all_to_all(_: Any, x: torch.Tensor, received: Any = None, sent: Any = None) -> torch.Tensor:
        counted.found[counted.parts[-1]] += 1
        with _disable_current_modes():
            rows = len(x) if received is None else sum(map(int, received))
            return torch.zeros(rows, *x.shape[1:], dtype=x.dtype)

    return all_to_all


def main() -> None:
    with pretended_world(0, 2, gpus=False):
        count()


def count() -> None:
    """Print the operations of a layer of the first rank."""
    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=2, create_gloo_process_groups=False
    )
    moe_utils.te_general_gemm = None  # Transformer Engine is not there
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=HIDDEN,
        moe_ffn_hidden_size=32,
        num_moe_experts=EXPERTS,
        expert_model_parallel_size=2,
        moe_router_topk=2,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        bf16=True,
        params_dtype=torch.bfloat16,
        **LLAMA,
    )
    gpt = GPTModel(config, llama_layers(EXPERTS), 64, TOKENS, position_embedding_type="rope")
    layer = gpt.to(torch.bfloat16).decoder.layers[0]
    rotary = gpt.rotary_pos_emb(TOKENS)
    counted = Counted()
    token_dispatcher.all_to_all = arrives(counted)
    counted.watch(layer.mlp.router, "forward", "router")
    counted.watch(layer.mlp.experts, "forward", "experts")
    for method, part in PARTS.items():
        counted.watch(layer.mlp.token_dispatcher, method, part)
    x = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the first run makes tables, too
        counted.found.clear()
        with counted:
            layer(x, attention_mask=None, rotary_pos_emb=rotary)
    print(f"{EXPERTS // 2} of {EXPERTS} experts on a rank, two choices a token")
    for part, count in counted.found.items():
        print(f"{part:20} {count:4}")


if __name__ == "__main__":
    main()
