"""Weight initialisation that does not depend on the layout: every slice is a slice of the whole."""

from collections.abc import Callable, Mapping, Sequence
from math import expm1, log

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.description.shape import EMBEDDING, canonical_name, parameter_shapes
from fivefold.mesh.slices import Piece, as_piece
from fivefold.model.lora import LORA, MAGNITUDE
from fivefold.model.seeds import derive_seed
from fivefold.model.transformer import Stage

_ROWS_PER_BLOCK = 256
# The outputs of the 2 L residual branches, or of L with one mixer a layer, are scaled down as in
# GPT-2, so that the variance of the residual stream does not grow with depth.
_RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "fc2_latent_proj.weight",
)
_EMBEDDINGS = EMBEDDING, "embed_positions.weight"
_GATED_NORM = "self_attn.norm.weight"
"""Parameters of layers with states; other norms may have weights that are offsets from 1."""
_FASTEST = 16.0
"""Largest decay of heads with states at first: uniform from 1, as in Megatron-LM."""
_STEPS = 0.001, 0.1
"""Smallest and largest step of Mamba-2's heads at first, as in Megatron-LM."""
_BENDS = {".alpha_p": log(expm1(0.8)), ".alpha_n": log(expm1(0.8 - 0.5))}
"""Initial values of xIELU's parameters: a slope of 0.8 on both sides, as in Apertus."""

Draw = Callable[[int, int, torch.Generator], Tensor]
"""(rows, columns, generator) -> drawn elements."""


def init_slice(
    name: str,
    global_shape: Sequence[int],
    slices: Sequence[slice],
    model: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A slice of a parameter's initial value, on the CPU.

    Every block of 256 rows has its own generator, seeded by (seed, name, block), so that a rank
    generates only the blocks that overlap its slice.

    Args:
        name: global name of the parameter, for example `layers.3.mlp.up_proj.weight`; a parameter
            of experts, [E, out, in], is generated expert by expert.
        global_shape: shape of the whole parameter.
        slices: one slice per dim, with step 1; slices may be empty.
        model: gives the standard deviation.
        seed: seed of the run.
        dtype: dtype of the result; values are generated in fp32.
    """
    name = canonical_name(model, name)
    spans = [part.indices(size)[:2] for part, size in zip(slices, global_shape, strict=True)]
    shape = [max(0, stop - start) for start, stop in spans]
    if name.endswith(MAGNITUDE):
        weight = f"{name.removesuffix(MAGNITUDE)}.weight"
        shape_there = parameter_shapes(model)[weight]
        rows = init_slice(weight, shape_there, (*slices, slice(None)), model, seed)
        return lengths_of(rows, dtype)
    if (of_states := _of_states(name, model)) is not None:
        draw, scale = of_states
        one = (global_shape[0], 1)
        return _matrix(name, one, [*spans, (0, 1)], scale, seed, dtype, draw)[:, 0]
    if name.endswith(tuple(_BENDS)):
        _, _, alpha = name.rpartition(".")
        return torch.full(shape, _BENDS[f".{alpha}"]).to(dtype)
    if len(global_shape) == 1 or name.endswith(".bias"):
        ones = name.endswith("norm.weight") and not model.apply_layernorm_1p
        ones = ones or name.endswith((_GATED_NORM, ".dt_bias", ".D", ".expert_scale"))
        value = 1.0 if ones else 0.0
        return torch.full(shape, value, dtype=dtype)
    if name.endswith(".conv1d.weight"):  # as PyTorch does
        features, _, taps = global_shape
        spans = [spans[0], spans[2]]
        rows = _matrix(name, (features, taps), spans, taps**-0.5, seed, dtype, _uniform)
        return rows.view(shape)
    if LORA in name:
        return _adapter(name, global_shape, spans, seed, dtype)
    std = model.init_method_std
    if name in _EMBEDDINGS:  # their weight decays like others', as in Megatron-LM 0.16.1
        std = model.embedding_init_method_std or std
    if name.endswith(_RESIDUAL_OUTPUTS):
        branches = 2 if model.hybrid_override_pattern is None else 1
        std /= (branches * model.num_layers) ** 0.5
    sizes = global_shape[-2], global_shape[-1]
    if len(global_shape) == 2:
        return _matrix(name, sizes, spans, std, seed, dtype)
    matrices = [
        _matrix(f"{name}.{index}", sizes, spans[1:], std, seed, dtype) for index in range(*spans[0])
    ]
    return torch.stack(matrices) if matrices else torch.empty(shape, dtype=dtype)


def lengths_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Magnitudes for rows of a weight whose adapter is still zero: [F, H] -> [F]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide).to(dtype)


def load_lengths(
    name: str,
    magnitudes: Piece,
    weight: Tensor | Piece,
    fill: Callable[[Mapping[str, Piece]], None],
) -> None:
    """Set new magnitudes to the row lengths of a loaded weight; each row is read whole.

    Args:
        name: stored name of the magnitudes.
        magnitudes: a rank's part of them, filled in place.
        weight: a rank's part of the weight, in the type in which it is computed with.
        fill: reads pieces of weights, by their stored names.
    """
    piece = as_piece(weight)
    columns = slice(0, piece.shape[1])
    rows = piece.local.new_empty(len(magnitudes.local), columns.stop)
    whole = Piece(rows, piece.shape, (*magnitudes.slices, columns))
    fill({f"{name.removesuffix(MAGNITUDE)}.weight": whole})
    magnitudes.local.copy_(lengths_of(rows, magnitudes.local.dtype))


def _adapter(
    name: str, shape: Sequence[int], spans: list[tuple[int, int]], seed: int, dtype: torch.dtype
) -> Tensor:
    """A slice of a matrix of an adapter, as PEFT initialises it: B is zero, and A uniform."""
    outputs, inputs = shape
    if name.endswith("lora_B.weight"):
        return torch.zeros([max(0, stop - start) for start, stop in spans], dtype=dtype)
    largest = inputs**-0.5
    return _matrix(name, (outputs, inputs), spans, largest, seed, dtype, _uniform)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1)."""
    return torch.rand(rows, columns, generator=generator).mul_(2.0).sub_(1.0)


def _of_states(name: str, model: ModelConfig) -> tuple[Draw, float] | None:
    """How vectors of layers with states are drawn, and their factor."""
    if name.endswith(".A_log"):
        return _fast, 1.0
    steps = model.hybrid_override_pattern is not None or model.fades_features
    if steps and name.endswith(".dt_bias"):
        return _steps, 1.0
    if name.endswith(".conv1d.bias"):  # as PyTorch does
        return _uniform, model.states.taps**-0.5
    return None


def _fast(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Logarithms of numbers uniform in [1, _FASTEST)."""
    return torch.rand(rows, columns, generator=generator).mul_(_FASTEST - 1.0).add_(1.0).log_()


def _steps(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Values from which softplus makes steps with uniform logarithms."""
    least, most = map(log, _STEPS)
    step = torch.rand(rows, columns, generator=generator).mul_(most - least).add_(least).exp_()
    return step + (-torch.expm1(-step)).log_()


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator)


def _matrix(
    name: str,
    sizes: tuple[int, int],
    spans: list[tuple[int, int]],
    scale: float,
    seed: int,
    dtype: torch.dtype,
    draw: Draw = _normal,
) -> Tensor:
    """A slice of a matrix of shape `sizes` with drawn elements, times `scale`."""
    (first, last), (left, right) = spans
    out = torch.empty(max(0, last - first), max(0, right - left), dtype=dtype)
    if out.numel() == 0:
        return out
    generator = torch.Generator()
    for block in range(first // _ROWS_PER_BLOCK, -(-last // _ROWS_PER_BLOCK)):
        start = block * _ROWS_PER_BLOCK
        stop = min(start + _ROWS_PER_BLOCK, sizes[0])
        generator.manual_seed(derive_seed(seed, name, block))
        rows = draw(stop - start, sizes[1], generator)
        top, bottom = max(first, start), min(last, stop)
        piece = rows[top - start : bottom - start, left:right]
        torch.mul(piece, scale, out=piece)
        out[top - first : bottom - first] = piece
    return out


def initial_buffer(name: str, model: ModelConfig) -> float:
    """The initial value of a buffer's elements, in fp32: layer factors, and router biases."""
    if not name.endswith("layer_scalar") or model.layer_scalar is None:
        return 0.0
    return torch.tensor(model.layer_scalar, dtype=torch.float32).item()


def initialise(stage: Stage, seed: int) -> None:
    """Initialise every parameter of an unsharded stage in place."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            whole = [slice(None)] * parameter.dim()
            parameter.copy_(init_slice(name, parameter.shape, whole, stage.model, seed))
