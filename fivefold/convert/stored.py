"""Where files of others hold each of our tensors: names, order, orientation.

Those of Hugging Face's models, and Megatron-core's distributed checkpoints.

The names are those of the files that transformers writes and that models are published in; what
transformers makes of them in memory may differ.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.config.huggingface.family import Tensors
from fivefold.config.model import ModelConfig
from fivefold.description.shape import parameter_shapes, prediction_prefixes

Shape = tuple[int, ...]
HEADS = ("lm_head.", "embed_out.")
"""Names of output layers, which have no prefix."""


@dataclass(frozen=True)
class Stored:
    """Where one of our tensors is stored; if experts are stored apart, the tensor of all E of them.

    Attributes:
        shape: shape of our tensor.
        names: the tensor there; E of them if `by_expert`.
        axis: dim of our tensor that counts output features or vocabulary entries, from the end.
        rows: place there of each place along `axis`; None: the same. Places past the end of
            `rows` are padding, which is not stored.
        of: size of that dim there.
        transposed: whether the last two dims are swapped there.
        by_expert: whether each expert, an index of our first dim, is a tensor of its own.
        around: dims of 1 that it has there before and after its own.
        joined: sizes along `axis` of several tensors there, which follow one another in `rows`;
            empty: there is one.
    """

    shape: Shape
    names: tuple[str, ...]
    axis: int
    rows: Tensor | None = None
    of: int | None = None
    transposed: bool = False
    by_expert: bool = False
    around: tuple[int, int] = (0, 0)
    joined: tuple[int, ...] = ()

    def one_of(self, name: str) -> tuple["Stored", Tensor]:
        """For one of several joined tensors there: where it holds rows of ours, and which rows."""
        assert self.rows is not None, "joined tensors have an order of rows"
        which = self.names.index(name)
        first, size = sum(self.joined[:which]), self.joined[which]
        ours = ((self.rows >= first) & (self.rows < first + size)).nonzero().flatten()
        shape = list(self.shape)
        shape[self.axis] = len(ours)
        place = replace(self, shape=tuple(shape), names=(name,), of=size, joined=())
        return replace(place, rows=self.rows[ours] - first), ours

    @property
    def their_shapes(self) -> dict[str, Shape]:
        """Shape of each tensor there."""
        if self.joined:
            return {name: self.one_of(name)[0].their_shape for name in self.names}
        return dict.fromkeys(self.names, self.their_shape)

    @property
    def their_shape(self) -> Shape:
        """Shape of the tensor there, or of each expert's."""
        shape = list(self.shape[1:] if self.by_expert else self.shape)
        shape[self.axis] = shape[self.axis] if self.of is None else self.of
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        before, after = self.around
        return (1,) * before + tuple(shape) + (1,) * after

    def bare(self, theirs: Tensor) -> Tensor:
        """A tensor there, or a part of it, without the surrounding dims of size 1."""
        before, after = self.around
        return theirs.reshape(theirs.shape[before : theirs.ndim - after])


def stored_tensors(
    files: Tensors, model: ModelConfig, *, neighbours: bool = True
) -> dict[str, Stored]:
    """Every parameter of a model, every router bias and every constant of a layer, by our names.

    Args:
        files: how they hold tensors.
        model: the architecture.
        neighbours: whether rotary features are stored as pairs of neighbours (`rope_interleave` of
            a config.json), where the family leaves that open.
    """
    shapes = dict(parameter_shapes(model)) | dict(_buffers(model))
    pairs = neighbours if files.pairs is None else files.pairs
    moved = files.turns_back or pairs != model.rotary_interleaved
    return {name: _place(files, model, name, shape, moved) for name, shape in shapes.items()}


def _buffers(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """What is stored besides parameters: biases of routers, and factors of layers."""
    layers = {f"layers.{layer}.": layer for layer in range(model.num_layers)}
    for depth in range(model.prediction_sets):
        layers |= prediction_prefixes(model, depth)
    for where, layer in layers.items():
        if model.moe_router_enable_expert_bias and model.is_moe(layer):
            yield f"{where}mlp.router.expert_bias", (model.num_experts or 0,)
        if model.layer_scalar is not None:
            yield f"{where}layer_scalar", (1,)


def _place(files: Tensors, model: ModelConfig, name: str, shape: Shape, moved: bool) -> Stored:
    of_bias = name.endswith("bias") or len(shape) == 1
    place = Stored(tuple(shape), (their_name(files, model, name),), -1 if of_bias else -2)
    if name.endswith("expert_bias"):
        return replace(place, around=(int(files.bias_in_row), 0))
    if model.fades_features and name.endswith(".A_log"):
        return replace(place, around=(2, 1))
    if name in ("embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        return replace(place, rows=torch.arange(model.vocab_size), of=model.vocab_size)
    if ".experts." in name:
        return _experts(files, model, name, place)
    if model.hybrid_override_pattern is not None and any(part in name for part in _MAMBA):
        return _mamba(model, name, place)
    if any(part in name for part in _LINEAR_ATTENTION):
        return _linear_attention(files, model, name, place)
    if ".indexer." in name:
        return replace(place, rows=_of_indexer(files, model, name, shape[0]))
    model = model.as_in(_layer_of(model, name))
    if model.attention_output_gate and ".self_attn.q_proj." in name:
        place = _queries_and_gates(files, model, place)
    joint = _joint(files, model, name, shape)
    if joint is not None:
        place = replace(place, rows=joint[0], of=joint[1])
    turned = _turned(files, model, name, shape[0]) if moved and "self_attn." in name else None
    if turned is not None:
        place = replace(place, rows=turned if place.rows is None else place.rows[turned])
    linear = not of_bias and "embed" not in name
    return replace(place, transposed=files.transposed and linear)


def _layer_of(model: ModelConfig, name: str) -> int:
    """The layer of a parameter; the layers of all predictions are alike."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return model.num_layers if layer is None else int(layer[1])


def _queries_and_gates(files: Tensors, model: ModelConfig, place: Stored) -> Stored:
    """What is here head by head: its query, then its gate; there all queries, and all gates."""
    parts = files.apart.get("q_proj.")
    if parts is None:
        return place
    before = place.names[0].rpartition("q_proj.")[0]
    rows = torch.arange(model.query_outputs).view(2, model.num_attention_heads, model.head_dim)
    return replace(
        place,
        names=tuple(f"{before}{part}weight" for part in parts),
        rows=rows.transpose(0, 1).flatten(),
        joined=(model.q_size, model.q_size),
    )


def _linear_attention(files: Tensors, model: ModelConfig, name: str, place: Stored) -> Stored:
    """What is here key head by key head: the convolution, and projections of which families have
    several; or of a short convolution, whose projections are one there, of B, C and x."""
    sizes = model.states
    if model.experimental_attention_variant == "short_convolution":
        if "conv1d." in name:
            return replace(place, axis=-3)
        gates, *others = _parts(model, [sizes.value] * 3)
        rows = torch.cat(others[::-1], dim=1) if "in_proj_xc." in name else gates
        return replace(place, rows=rows.flatten(), of=3 * model.hidden_size)
    values = sizes.heads // sizes.groups
    widths = [*[sizes.key] * 2, *[values * sizes.value] * 2]
    if "in_proj_ba." in name:
        widths = [values] * 2
    if "in_proj_qkv." in name or "conv1d." in name:
        widths = widths[:3]
    if "conv1d." in name:
        place = replace(place, axis=-3, rows=_by_group(model, widths))
    ours = next((ours for ours in files.apart if ours in name), None)
    if ours is None:
        return place
    before, apart = place.names[0].rpartition(ours)[0], files.apart[ours]
    of_parts = [sizes.groups * width for width in widths]
    first = 1 + len(of_parts) - len(apart)  # that many parts are one tensor there
    return replace(
        place,
        names=tuple(f"{before}{part}weight" for part in apart),
        rows=_by_group(model, widths),
        joined=(sum(of_parts[:first]), *of_parts[first:]),
    )


def _mamba(model: ModelConfig, name: str, place: Stored) -> Stored:
    """What is here group by group: the convolution, and all but the steps of the projection, which
    are one there, of gates, x, B, C and steps."""
    sizes = model.states
    of_heads = sizes.heads // sizes.groups * sizes.value
    if "conv1d." in name:
        axis = -1 if name.endswith("bias") else -3
        return replace(place, axis=axis, rows=_by_group(model, [of_heads, *[sizes.key] * 2]))
    size = sizes.size + sizes.mixed
    if "in_proj_dt." in name:
        return replace(place, rows=torch.arange(size, size + sizes.heads), of=size + sizes.heads)
    z, x, *others = _parts(model, [of_heads, of_heads, *[sizes.key] * 2])
    rows = torch.cat([x, *others, z], dim=1).flatten()
    return replace(place, rows=rows, of=size + sizes.heads)


def _by_group(model: ModelConfig, widths: Sequence[int]) -> Tensor:
    """Rows of parts that follow one another, each group's (or key head's) of all parts together."""
    return torch.cat(_parts(model, widths), dim=1).flatten()


def _parts(model: ModelConfig, widths: Sequence[int]) -> list[Tensor]:
    """Rows of parts that follow one another, each [groups, its width]."""
    groups = model.states.groups
    parts = torch.arange(groups * sum(widths)).split([groups * width for width in widths])
    return [part.view(groups, -1) for part in parts]


def _experts(files: Tensors, model: ModelConfig, name: str, place: Stored) -> Stored:
    """Experts stored one by one, or together."""
    if files.experts == "each":
        assert model.num_experts is not None
        names = tuple(place.names[0].replace("{e}", str(e)) for e in range(model.num_experts))
        return replace(place, names=names, by_expert=True)
    transposed = files.experts != "together" and not name.endswith("bias")
    place = replace(place, transposed=transposed)
    if "down_proj" in name or not model.gated_linear_unit:
        return place
    inner = model.expert_ffn_size
    gate, up = torch.arange(2 * inner).chunk(2)
    if files.experts == "alternating":
        gate, up = 2 * torch.arange(inner), 2 * torch.arange(inner) + 1
    return replace(place, rows=up if "up_proj" in name else gate, of=2 * inner)


def _joint(
    files: Tensors, model: ModelConfig, name: str, shape: Sequence[int]
) -> tuple[Tensor, int] | None:
    """Rows of queries, keys, values, gate or up in a joint projection, and its size; None for
    other tensors."""
    which = next((i for i, part in enumerate("qkv") if f"self_attn.{part}_proj" in name), None)
    gated = files.joint_mlp and model.gated_linear_unit
    if gated and (".gate_p" in name or ".up_p" in name):
        gate, up = torch.arange(2 * shape[0]).chunk(2)
        return (gate if ".gate_p" in name else up), 2 * shape[0]
    if which is None or files.joint_qkv is None:
        return None
    if files.joint_qkv == "in_turn":
        sizes = model.q_size, model.k_size, model.v_size
        return torch.arange(sum(sizes)).split(sizes)[which], sum(sizes)
    if files.joint_qkv == "by_quarter":
        quarters = torch.arange(3 * model.q_size).view(4, 3, -1)
        return quarters[:, (0, 2, 1)[which]].flatten(), 3 * model.q_size
    groups = model.num_kv_heads
    queries = model.num_attention_heads // groups
    size = groups * (queries + 2) * model.head_dim
    rows = torch.arange(size)
    of_group = slice(0, queries) if which == 0 else slice(queries + which - 1, queries + which)
    by_head = rows.view(groups, queries + 2, model.head_dim)
    return by_head[:, of_group].flatten(), size


def _turned(files: Tensors, model: ModelConfig, name: str, size: int) -> Tensor | None:
    """Rows of rotary features as two halves, where neighbours are pairs there, or the other way
    round, or where halves change places; None for others."""
    rotary, halves = model.rotary_dim, _halves(model)
    if files.turns_back:
        halves = torch.arange(rotary).view(2, -1).flip(0).flatten()
    if model.rotary_interleaved:
        halves = torch.arange(rotary).view(2, -1)
        halves = (halves.flip(0) if files.turns_back else halves).t().flatten()
    latent = model.multi_latent_attention
    if latent and "kv_a_proj." in name:
        return torch.cat([torch.arange(size - rotary), size - rotary + halves])
    of_heads = ("q_proj.", "q_b_proj.") if latent else ("q_proj.", "k_proj.", "q_norm.", "k_norm.")
    if not any(part in name for part in of_heads):
        return None
    gated = model.attention_output_gate and "q_proj." in name
    one = torch.cat([halves, torch.arange(rotary, model.head_dim * (1 + gated))])
    if latent:
        one = torch.cat([torch.arange(model.qk_head_dim), model.qk_head_dim + halves])
    return (torch.arange(0, size, len(one))[:, None] + one).flatten()


def _of_indexer(files: Tensors, model: ModelConfig, name: str, size: int) -> Tensor | None:
    """The same for an indexer's queries and key, whose first features are rotary."""
    if not files.index_pairs or "weights_proj." in name:
        return None
    one = torch.cat([_halves(model), torch.arange(model.rotary_dim, model.indexer.dim)])
    return (torch.arange(0, size, len(one))[:, None] + one).flatten()


def _halves(model: ModelConfig) -> Tensor:
    """Places of rotary features as two halves, where neighbours are pairs."""
    rotary = model.rotary_dim
    return torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])


def has_predictions(files: Tensors, model: ModelConfig, names: Iterable[str]) -> bool:
    """Whether some of these names belong to multi-token prediction layers."""
    return any(_predicting(files, model, name)[0] >= 0 for name in names)


def their_name(files: Tensors, model: ModelConfig, name: str) -> str:
    """A tensor's name there; `{e}` stands for the index of an expert."""
    predicts = name.startswith("mtp.")
    if predicts:
        name = _in_prediction(files, model, name)
    layer = re.match(r"layers\.(\d+)\.", name)
    hybrid = model.hybrid_override_pattern is not None
    if layer is not None and model.is_linear(int(layer[1])) and not hybrid:
        name = name.replace(".self_attn.", files.linear)
    if name.startswith("norm."):
        name = files.last + name.removeprefix("norm.")
    two_norms = model.parallel_residual and not model.parallel_residual_one_norm
    for ours, theirs in {**(files.two_norms if two_norms else {}), **files.names}.items():
        name = name.replace(ours, theirs)
    if predicts and files.further:
        return files.further + name
    return name if name.startswith(HEADS) else files.base + name


def _in_prediction(files: Tensors, model: ModelConfig, name: str) -> str:
    """A name in the layers of predictions: DeepSeek's after the last, or with their own numbers.

    What is around several layers of a prediction is in the first and the last of them.
    """
    _, depth, inner = name.split(".", 2)
    layer, size = int(depth) * model.prediction_size, model.prediction_size
    if inner == "norm.weight":
        inner = "final_layernorm.weight" if files.further else "shared_head.norm.weight"
        layer += size - 1
    elif inner.startswith("layer."):
        inner = inner.removeprefix("layer.")
        if model.mtp_hybrid_override_pattern is not None:
            which, _, inner = inner.partition(".")
            layer += int(which)
    return f"layers.{layer + (0 if files.further else model.num_layers)}.{inner}"


def numbers_beside(files: Tensors, names: Iterable[str]) -> dict[str, tuple[str, float]]:
    """Numbers that are stored as tensors there, by name: the tensor that each lies beside, and its
    value."""
    return {
        name.removesuffix(beside) + ending: (name, number)
        for name in names
        for ending, (beside, number) in files.numbers.items()
        if name.endswith(beside)
    }


_LINEAR_ATTENTION = (
    *("conv1d.", "in_proj_qkvz.", "in_proj_ba.", "in_proj_qkv.", "in_proj_xc.", "in_proj_b."),
)
_MAMBA = "conv1d.", "in_proj_xbcz.", "in_proj_dt."


def harmless(files: Tensors, model: ModelConfig, name: str) -> bool:
    """Whether a tensor there has no effect: a constant, a copy, or part of a layer that is left
    out."""
    tail = name.removeprefix(files.base)
    if copied(files, model, name) or tail.startswith(files.left_out):
        return True
    if tail.endswith(("rotary_emb.inv_freq", *files.constants, *files.numbers)):
        return True
    return files.predicts and _predicting(files, model, name)[0] >= model.prediction_sets


def copied(files: Tensors, model: ModelConfig, name: str) -> str | None:
    """The tensor of which another one must be a copy: the embedding or head; else None."""
    embedding, head = (
        their_name(files, model, f"{of}.weight") for of in ("embed_tokens", "lm_head")
    )
    tied = not model.untie_embeddings_and_output_weights
    if name == head and tied:
        return embedding
    depth, inner = _predicting(files, model, name)
    if not 0 <= depth < model.prediction_sets:
        return None
    copies = {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
    return embedding if tied and inner in copies else copies.get(inner)


def _predicting(files: Tensors, model: ModelConfig, name: str) -> tuple[int, str]:
    """For a tensor of a multi-token prediction layer: how many predictions precede it, and its name
    there; else -1."""
    tail = name.removeprefix(files.further or files.base)
    layer = re.fullmatch(r"layers\.(\d+)\.(.*)", tail)
    if layer is None or not name.startswith(files.further):
        return -1, tail
    number = int(layer[1]) - (0 if files.further else model.num_layers)
    return number // model.prediction_size, layer[2]
