"""What is moved to the host leaves the device, comes back the same, and is counted once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.config.memory import MemoryConfig, OffloadModule
from fivefold.description.activations import saved_activations, total
from fivefold.description.running import Running
from fivefold.memory.offload import Host, install_offload
from fivefold.memory.recompute import install_recompute
from fivefold.model.batch import on_device
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.install import install_deferral
from tests.model.models import GPT, LLAMA, batch_of, build

MODEL = replace(LLAMA, num_layers=5)
T = 24
EVERY: tuple[OffloadModule, ...] = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
)
CPU = torch.device("cpu")


def _moving(
    modules: tuple[OffloadModule, ...], least: int = 1, model: Any = MODEL, share: float = 1.0
) -> tuple[Stage, Host]:
    stage, host = build(model), Host(CPU, least, share)
    install_deferral(stage, DeferredWeights(), recomputes=False)
    install_offload(stage, MemoryConfig(offload_modules=modules), host)
    return stage, host


def _grads(stage: Stage) -> dict[str, Tensor]:
    stage(None, batch_of(MODEL, [[5, 7], [12]])).backward()
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", [MODEL, replace(GPT, num_layers=5)], ids=["llama", "gpt"])
def test_gradients_are_the_same_up_to_rounding(model: Any) -> None:
    plain, moved = _grads(build(model)), _grads(_moving(EVERY, model=model, share=0.3)[0])
    assert plain.keys() == moved.keys()
    again = _moving(EVERY, model=model)[0]
    recomputing = MemoryConfig(
        recompute_granularity="selective", recompute_modules=("mlp", "core_attn")
    )
    install_recompute(again, recomputing)
    both = _grads(again)
    largest = max(grad.abs().max() for grad in plain.values())
    for name, grad in plain.items():
        # Memory that is aligned otherwise lets a matrix product sum in another order.
        assert (moved[name] - grad).abs().max() <= 1e-14 * largest, name
        assert torch.equal(both[name], moved[name])


BYTES = {
    "attn_norm": 5 * T * MODEL.hidden_size * 8,
    "qkv_linear": 5 * T * MODEL.hidden_size * 8,
    "mlp_norm": 5 * T * MODEL.hidden_size * 8,
    "attn_proj": 5 * T * MODEL.q_size * 8,
}


@pytest.mark.parametrize("module", BYTES)
def test_the_inputs_of_a_module_move_and_no_parameter(module: OffloadModule) -> None:
    stage, host = _moving((module,), least=8 * T + 1)  # row statistics of norms stay
    _grads(stage)
    assert host.link.to_host_bytes == BYTES[module]


def test_small_tensors_and_evaluations_move_nothing() -> None:
    stage, host = _moving(EVERY, least=1 << 20)
    _grads(stage)
    assert host.link.to_host_bytes == 0
    stage, host = _moving(EVERY)
    with torch.no_grad():
        stage(None, batch_of(MODEL, [[12]]))
    assert host.link.to_host_bytes == 0


SIZES = (MODEL.k_size, MODEL.hidden_size, MODEL.q_size)


@pytest.mark.parametrize(
    "least", [least for size in SIZES for least in (8 * T * size, 8 * T * size + 1)]
)
@pytest.mark.parametrize("share", [1.0, 0.375])
def test_tensors_of_fewer_bytes_stay_as_the_planner_counts(least: int, share: float) -> None:
    stage, host = _moving(EVERY, least, share=share)
    stage(None, batch_of(MODEL, [[12], [12]])).backward()
    memory = MemoryConfig(
        fine_grained_activation_offloading=True,
        offload_modules=EVERY,
        min_offloaded_tensor_size=least,
        activation_offload_fraction=share,
    )
    running = Running(12, 8, 8, memory=memory, microbatch_tokens=T)
    counted = total(total(saved_activations(MODEL, n, running)) for n in range(5))
    assert host.link.to_host_bytes == T * counted.offloaded


def test_views_of_one_memory_move_together_or_not_at_all() -> None:
    def views(x: Tensor) -> Tensor:
        row, whole = x.detach()[0], x.detach()  # 8 of 64 numbers, and all of them
        return x[0] * row + (x * whole).sum(0)

    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    for least, bytes_ in ((x.nbytes, x.nbytes), (x.nbytes + 1, 0)):
        host = Host(CPU, least)
        host.moving(views)(x).sum().backward()
        assert host.link.to_host_bytes == bytes_


def _alive(stage: Stage) -> int:
    """How many inputs of a layer's norms are there after the forward."""
    refs: list[StorageWeakRef] = []
    for name, module in stage.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_pre_hook(
                lambda _, given: refs.append(StorageWeakRef(given[0].untyped_storage()))
            )
    loss = stage(None, batch_of(MODEL, [[5, 7], [12]]))
    alive = sum(not ref.expired() for ref in refs)
    loss.backward()
    return alive


def test_what_has_moved_is_freed() -> None:
    assert _alive(build(MODEL)) == 10
    assert _alive(_moving(("attn_norm", "mlp_norm"))[0]) == 0
    assert _alive(_moving(("attn_norm",))[0]) == 5
    assert _alive(_moving(("attn_norm",), share=0.5)[0]) == 5, "what stays is a copy"


def test_memory_that_is_saved_twice_moves_once_and_comes_back_before_it_is_needed() -> None:
    host = Host(CPU, 1)
    first = host.moving(lambda x: x.sin() * x.cos())  # saves x twice, and both factors
    second = host.moving(torch.exp)  # saves its result
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    y = second(first(x))
    assert host.link.to_host_bytes == 4 * x.nbytes
    y.sum().backward()
    (true,) = torch.autograd.grad((x.sin() * x.cos()).exp().sum(), x)
    assert x.grad is not None and torch.equal(x.grad, true)


@pytest.mark.gpu
def test_copies_beside_compute_change_nothing() -> None:
    stage = build(MODEL).cuda()
    batch = on_device([batch_of(MODEL, [[5, 7], [12]])], torch.device("cuda"))[0]
    stage(None, batch).backward()
    true = {name: p.grad for name, p in stage.named_parameters()}
    stage.zero_grad()
    host = Host(torch.device("cuda"), 1)
    install_offload(stage, MemoryConfig(offload_modules=EVERY), host)
    stage(None, batch).backward()
    assert host.link.to_host_bytes
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, true[name])
