"""Reads Megatron-core's distributed checkpoints (`--ckpt-format torch_dist`).

This does not need the package, and unpickles nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.checkpoint.index import SavedTensor, read_foreign_index
from fivefold.checkpoint.matching import check_shapes
from fivefold.config.huggingface.family import Tensors
from fivefold.config.megatron_job.unlike import unlike
from fivefold.config.model import ModelConfig
from fivefold.convert.megatron_common import read_common
from fivefold.convert.megatron_tensors import MegatronTensors, StateTensors
from fivefold.convert.stored import Stored, stored_tensors
from fivefold.errors import CheckpointError, Mistake

_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(.*)", re.DOTALL)
_OF_STATE = re.compile(r"state\.(\w+)\.(.*)", re.DOTALL)
_MLPS = {
    ".mlp": ".mlp",
    ".mlp.shared_experts": ".mlp.shared_experts",
    ".mlp.experts": ".mlp.experts.experts",
}
_TENSORS = Tensors(
    {
        "embed_tokens.": "embedding.word_embeddings.",
        "embed_positions.": "embedding.position_embeddings.",
        "lm_head.": "output_layer.",
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".post_attention_layernorm.": ".mlp.linear_fc1.layer_norm_",
        "layers.": "decoder.layers.",
        **{f".self_attn.{part}_proj.": ".self_attention.linear_qkv." for part in "qkv"},
        ".self_attn.o_proj.": ".self_attention.linear_proj.",
        ".self_attn.q_norm.": ".self_attention.q_layernorm.",
        ".self_attn.k_norm.": ".self_attention.k_layernorm.",
        ".self_attn.sinks.weight": ".self_attention.core_attention.softmax_offset",
        ".mlp.shared_expert_gate.weight": ".mlp.shared_experts.gate_weight",
        **{f"{of}.gate_proj.": f"{to}.linear_fc1." for of, to in _MLPS.items()},
        **{f"{of}.up_proj.": f"{to}.linear_fc1." for of, to in _MLPS.items()},
        **{f"{of}.down_proj.": f"{to}.linear_fc2." for of, to in _MLPS.items()},
    },
    base="",
    last="decoder.final_layernorm.",
    joint_qkv="by_head",
    joint_mlp=True,
    experts="together",
    pairs=None,
)


class MegatronFolder(MegatronTensors):
    """The weights of a checkpoint, and the optimizer state for them.

    Args:
        path: folder of the checkpoint.

    Attributes:
        states: the optimizer's states of weights by name, such as "exp_avg", as far as they are
            tensors like the weights.
        in_buckets: whether it has others, which only the layout that saved them can read.

    Raises:
        CheckpointError: its index is damaged.
    """

    def __init__(self, path: Path) -> None:
        weights: dict[str, SavedTensor] = {}
        states: dict[str, dict[str, SavedTensor]] = {}
        self.in_buckets = False
        for name, saved in read_foreign_index(path).items():
            of_optimizer = _OF_OPTIMIZER.fullmatch(name)
            if of_optimizer is None:
                weights[name] = saved
            elif (of_state := _OF_STATE.fullmatch(of_optimizer[1])) is not None:
                states.setdefault(of_state[1], {})[of_state[2]] = saved
            else:
                self.in_buckets = True
        super().__init__(path, weights)
        self.states = {state: StateTensors(path, held, self) for state, held in states.items()}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the run that saved it, as far as they are recorded.

        Raises:
            CheckpointError: its common.pt cannot be read.
        """
        arguments = read_common(self.path).get("args")
        return arguments if isinstance(arguments, dict) else {}

    def places(self, model: ModelConfig) -> dict[str, Stored]:
        """Where each tensor of a model lies, checked: names, shapes and arguments agree.

        Raises:
            CheckpointError: it is of another model, or of one that Megatron-core has not, or whose
                tensors are not read here.
        """
        _see_kind(model)
        arguments = self.arguments
        if wrong := unlike(model, arguments):
            raise CheckpointError(Mistake(f"{self.path} is of another model", tuple(wrong)))
        stored = stored_tensors(_TENSORS, model, neighbours=model.rotary_interleaved)
        places = {
            name: self._in_parts(name, self._padded(place, model, arguments))
            for name, place in stored.items()
        }
        asked = {name: place.their_shape for place in places.values() for name in place.names}
        saved = {name: self.shape(name) for name in self._where}
        check_shapes(self.path, asked, saved)
        return places

    def _padded(self, place: Stored, model: ModelConfig, arguments: Mapping[str, Any]) -> Stored:
        """The vocabulary with the rows that it has there, which are padded for their tp."""
        (name,) = place.names
        if place.of != model.vocab_size or name not in self._where:
            return place
        rows, vocabulary = self.shape(name)[0], model.vocab_size
        multiple = arguments.get("make_vocab_size_divisible_by")
        if type(multiple) is not int or multiple < 1:
            multiple = model.make_vocab_size_divisible_by
        tp = arguments.get("tensor_model_parallel_size")
        degrees = [tp] if type(tp) is int and tp > 0 else [1 << power for power in range(7)]
        steps = [1, *(multiple * degree for degree in degrees)]  # 1: not padded
        if rows not in {-(-vocabulary // step) * step for step in steps}:
            return place  # another vocabulary, reported as a different shape
        return replace(place, of=rows)

    def _in_parts(self, name: str, place: Stored) -> Stored:
        """Gate, up and experts as separate tensors, if a checkpoint stores them so."""
        (there,) = place.names
        if there in self._where:
            return place
        by_expert = ".experts." in name and len(place.shape) > 1
        of_one = [there]
        if by_expert:
            experts = range(place.shape[0])
            of_one = [there.replace(".experts.experts.", f".experts.experts.{e}.") for e in experts]
        half = "_w" if ".gate_proj." in name else "_v" if ".up_proj." in name else ""
        if half and of_one[0] + half in self._where:
            of_one = [part + half for part in of_one]
            place = replace(place, rows=None, of=None)
        if of_one[0] not in self._where:
            return place
        return replace(place, names=tuple(of_one), by_expert=by_expert)


def _see_kind(model: ModelConfig) -> None:
    wrong = [
        what
        for what, there in (
            ("multi_latent_attention", model.multi_latent_attention),
            ("mtp_num_layers", model.mtp_num_layers > 0),
            ("parallel_residual", model.parallel_residual),
            ("attention_output_gate", model.attention_output_gate),
            ("experimental_attention_variant", model.experimental_attention_variant is not None),
            ("hybrid_override_pattern", model.hybrid_override_pattern is not None),
        )
        if there
    ]
    if wrong:
        what = f"Megatron-core's checkpoints are read without {', '.join(wrong)}"
        raise CheckpointError(Mistake(what, attempt="a Hugging Face folder of the model"))
