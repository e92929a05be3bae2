"""AdamW on local parameter shards; its state can be loaded into any layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.training import BLOCK, OptimizerConfig
from fivefold.mesh.slices import Piece, local_tensor, piece_of
from fivefold.model.leaves import keep_gradients_in
from fivefold.optim.eight_bit import FORMATS
from fivefold.optim.rounding import (
    MASTER,
    MOMENTS,
    REMAINDER,
    NamedElements,
    RoundingAdamW,
    divide,
    exact,
    scale_of,
)
from fivefold.optim.schedule import StepRates

SCALES = tuple(map(scale_of, MOMENTS))
STATES = (*MOMENTS, *SCALES)
"""Kinds of optimizer state that a checkpoint may contain for a parameter."""
DECAYS, OF_ENDS = "decays", "of_ends"
"""Keys that torch's parameter groups carry: `decays`, and `is_end`."""
OPTIMIZER = "optim."
"""Prefix of these names in a checkpoint."""
Block = tuple[Sequence[nn.Parameter], Callable[[], None]]


class AdamW:
    """`torch.optim.AdamW`, fused, on this rank's shards.

    Of weights in 16 bits that have neither remainders nor are their own masters, it keeps masters
    in fp32, which it updates and rounds into the weights.

    Every parameter that requires a gradient is updated in every step; a missing gradient counts as
    zero. So the updated parameters do not depend on the layout (an expert may get no token).

    Args:
        parameters: parameters by global name, plain tensors or DTensors, already on their device.
        config: betas, epsilon and weight decay.
        blocks: parameters that are updated together, and what is called once their new values are
            on their way, in the order of the updates; empty: all parameters together.
        places: name -> where a parameter's part is in the whole model; needed where moments
            have fewer bits than parameters, which are then rounded stochastically, or gradients.
        storage: zeros in which moments are kept, by their names in `state_tensors`; for others, and
            if there are none, memory is taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        blocks: Sequence[Block] = (),
        places: Mapping[str, NamedElements] | None = None,
        storage: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._places, storage = places or {}, storage or {}
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._leaves = {name: local_tensor(p) for name, p in self._parameters.items()}
        narrow = {n for n, leaf in self._leaves.items() if leaf.itemsize == 2}
        self._apart = set() if config.narrow_parameters else narrow
        self._leaves |= {name: self._leaves[name].detach().float() for name in self._apart}
        if config.narrow_gradients or narrow:
            kept = torch.bfloat16 if config.narrow_gradients else torch.float32
            for tensor in (*self._parameters.values(), *self._leaves.values()):
                keep_gradients_in(tensor, kept)
        self._state: dict[str, dict[str, Tensor]] = {
            name: {"step": torch.zeros((), dtype=torch.float32, device=leaf.device)}
            | {
                state: storage[stored]
                if (stored := state_name(state, name)) in storage
                else torch.zeros_like(like, device=leaf.device)
                for state, like in self._moments(name, leaf, config).items()
            }
            for name, leaf in self._leaves.items()
        }
        for name in self._apart:
            self._state[name][MASTER] = self._leaves[name]
        if config.store_param_remainders:
            for name, leaf in self._leaves.items():
                self._state[name][REMAINDER] = torch.zeros_like(leaf, dtype=torch.int16)
        named = {parameter: name for name, parameter in self._parameters.items()}
        self._updates: list[tuple[list[Any], list[str], Callable[[], None]]] = []
        for together, then in blocks or ((tuple(named), lambda: None),):
            names = [named[p] for p in together if p in named]
            self._updates.append((self._optimizers(names, config), names, then))
        self._steps = 0

    def _moments(self, name: str, leaf: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
        """Tensors on the meta device like the moments of a parameter."""
        return moments_like(leaf, config)

    def _optimizers(self, names: Sequence[str], config: OptimizerConfig) -> list[Any]:
        """torch's AdamW optimizers for parameters of these names, for shards with elements."""
        kinds: dict[tuple[bool, bool], list[Tensor]] = {(True, False): [], (False, False): []}
        for name in names:
            if self._leaves[name].numel():
                of_ends = config.decoupled_lr is not None and is_end(name)
                kind = decays(name, self._parameters[name]), of_ends
                kinds.setdefault(kind, []).append(self._leaves[name])
        groups: list[dict] = [
            {"params": leaves, DECAYS: decaying, OF_ENDS: of_ends}
            for (decaying, of_ends), leaves in kinds.items()
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        settings: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.adam_eps}
        if config.needs_rounding:
            places = {self._leaves[n]: self._places[n] for n in names if n in self._places}
            optimizer: Any = RoundingAdamW(groups, places, lambda: self._steps, **settings)
        else:
            optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        for name in names:
            optimizer.state[self._leaves[name]] = self._state[name]
        return [optimizer]

    @property
    def steps(self) -> int:
        """Steps taken, which the bias correction needs; set it after loading a state."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for state in self._state.values():
            state["step"].fill_(steps)

    @torch.no_grad()
    def step(self, rates: StepRates, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients, without synchronising with the device.

        Args:
            rates: learning rates and weight decay.
            found_inf: fp32 scalar on the device. Where it is 1, weights and moments stay bitwise
                unchanged, and the caller must then decrement `steps`. None: 0.
        """
        for name, leaf in self._leaves.items():
            if not leaf.numel():
                continue
            parameter = self._parameters[name]
            if name not in self._apart:
                # `Module.to` or an assigning load may have replaced the parameter's storage.
                leaf.data = local_tensor(parameter)
            grad = parameter.grad
            if grad is None:
                leaf.grad = torch.zeros_like(leaf, dtype=leaf.grad_dtype)
            else:
                leaf.grad = local_tensor(grad)
        for optimizers, names, then in self._updates:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rates.of_ends if group[OF_ENDS] else rates.lr
                    group["weight_decay"] = rates.decay if group[DECAYS] else 0.0
                optimizer.found_inf = found_inf  # as torch's GradScaler hands it to fused kernels
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self._publish([name for name in names if name in self._apart])
            then()
        self._steps += 1

    def zero_grad(self) -> None:
        """Drop the parameters' gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Piece]:
        """The moments, as `optim.exp_avg.NAME` and `optim.exp_avg_sq.NAME`, for a checkpoint.

        And their scales, if they have any, as `optim.exp_avg_scale.NAME`. They are laid out like
        their parameters and share the optimizer's storage, so loading into them restores the
        optimizer, except for `steps`.
        """
        return {
            state_name(state, name): state_piece(state, piece_of(parameter), tensor)
            for name, parameter in self._parameters.items()
            for state, tensor in self._state[name].items()
            if state in STATES
        }

    def held(self) -> Iterator[Tensor]:
        """Moments, their scales, and the remainders of masters."""
        for state in self._state.values():
            yield from (tensor for name, tensor in state.items() if name != "step")

    def weights(self) -> dict[str, Piece]:
        """The weights that are updated: for 16-bit weights their fp32 masters, as copies if stored
        as remainders."""
        found = {name: piece_of(parameter) for name, parameter in self._parameters.items()}
        for name, state in self._state.items():
            if REMAINDER in state:
                found[name] = found[name].like(exact(found[name].local, state[REMAINDER]))
            elif MASTER in state:
                found[name] = found[name].like(state[MASTER])
        return found

    def beside(self, name: str) -> Tensor | None:
        """What is stored in addition to a 16-bit weight: its master, its remainder, or nothing."""
        state = self._state.get(name, {})
        return state.get(MASTER, state.get(REMAINDER))

    @torch.no_grad()
    def take(self, weights: Mapping[str, Piece]) -> None:
        """Set weights by name, if `weights` gave copies; others have changed in place."""
        for name, piece in weights.items():
            if REMAINDER in self._state.get(name, ()):
                weight = local_tensor(self._parameters[name])
                divide(piece.local, weight, self._state[name][REMAINDER])
        self._publish([name for name in weights if name in self._apart])

    def _publish(self, names: Sequence[str]) -> None:
        """Round masters into weights."""
        weights = [local_tensor(self._parameters[name]) for name in names]
        if weights:
            torch._foreach_copy_(weights, [self._leaves[name] for name in names])


def moments_like(leaf: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
    """Empty tensors on the meta device with the shapes of a parameter's moments, and of their
    scales.

    Vectors, such as norms and biases, have no moments in 8 bits: they are few.
    """
    found: dict[str, Tensor] = {}
    for moment, kind in zip(MOMENTS, config.moment_types, strict=True):
        eight = kind == "fp8" and leaf.ndim > 1
        narrow_leaf = config.narrow_parameters and leaf.dtype == torch.bfloat16
        wide = torch.float32 if narrow_leaf else leaf.dtype
        narrow = {"bf16": torch.bfloat16, "fp8": FORMATS[moment].dtype if eight else wide}
        dtype = narrow.get(kind, wide)
        found[moment] = torch.empty(leaf.shape, dtype=dtype, device="meta")
        if eight:
            blocks = (*leaf.shape[:-1], -(-leaf.shape[-1] // BLOCK))
            found[scale_of(moment)] = torch.empty(blocks, dtype=torch.uint8, device="meta")
    return found


def state_piece(state: str, piece: Piece, local: Tensor) -> Piece:
    """A tensor of the optimizer's state, of the kind `state`, laid out like a parameter's piece."""
    if state not in SCALES:
        return piece.like(local)
    *outer, inner = piece.slices
    blocks = slice(inner.start // BLOCK, -(-inner.stop // BLOCK))
    shape = torch.Size([*piece.shape[:-1], -(-piece.shape[-1] // BLOCK)])
    return Piece(local, shape, (*outer, blocks))


def state_name(state: str, name: str) -> str:
    """The name in a checkpoint of a state of the parameter called `name`."""
    return f"{OPTIMIZER}{state}.{name}"


def is_end(name: str) -> bool:
    """Whether a parameter is a weight of the embedding or of the output layer, or a copy of it."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and vectors, as in Megatron-LM.

    Uses the dims of the global tensor, which sharding does not change.
    """
    return parameter.ndim > 1 and not name.endswith(".bias")
