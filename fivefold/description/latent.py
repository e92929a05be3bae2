"""The operations of latent attention before its scores, and of experts' latents; their costs."""

from dataclasses import dataclass

from fivefold.config.model import ModelConfig
from fivefold.description.operations import QKV, Kept, Operation
from fivefold.description.running import Running, gradient_bytes
from fivefold.description.weights import Weight, column, norm_weights, whole


@dataclass(frozen=True, kw_only=True)
class LatentDown(Operation):
    """Down-projections into the latents of queries and of keys and values; replicated over TP.

    Attributes:
        inputs: features of a token.
        norms: number of latent normalisations.
        recomputed_by: recomputed modules that recompute the input.
        shared_input: whether another item already counts the input.
    """

    inputs: int
    norms: int
    recomputed_by: tuple[str, ...] = ()
    shared_input: bool = False

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """Its input, in the dtype of the matrix multiplication."""
        if self.shared_input and not running.narrows("layernorm"):
            return ()
        size = running.input_size("layernorm") * self.inputs / running.token_parts
        # Each rank multiplies its own tokens.
        scaled = (self.inputs,) if running.narrows("layernorm") else ()
        return (Kept(self.name, (size,), self.recomputed_by, self.moved(running), scaled=scaled),)

    def deferred(self, running: Running) -> float:
        """Its input; gradients of the latents are negligible."""
        if self.shared_input:
            return 0.0
        return running.input_bytes * self.inputs / running.token_parts


@dataclass(frozen=True, kw_only=True)
class LatentLinear(Operation):
    """A projection of tokens into what experts read, or back; replicated over TP.

    Attributes:
        inputs: features of a token before it.
        outputs: features after it.
        reads_moe_input: whether it reads what the router does, which counts with that.
    """

    inputs: int
    outputs: int
    reads_moe_input: bool

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """Its input, or a narrower copy beside that of the router."""
        whole = ("layernorm",) if self.reads_moe_input else ()
        narrows = running.narrows(*whole)
        counted = self.reads_moe_input and not narrows
        size = 0.0 if counted else running.input_size(*whole) * self.inputs / running.token_parts
        scaled = (self.inputs,) if narrows else ()
        return (Kept(self.name, (size,), ("moe",), scaled=scaled),)

    def deferred(self, running: Running) -> float:
        """The input, if the router does not count it, and the gradient of the output, if the layer
        does not."""
        kept = 0 if self.reads_moe_input else self.inputs
        made = self.outputs if self.reads_moe_input else 0
        size = running.input_bytes * kept + gradient_bytes(running) * made
        return size / running.token_parts


@dataclass(frozen=True, kw_only=True)
class LatentUp(Operation):
    """Up-projections from latents to this rank's heads.

    Attributes:
        latents: features of all latents together.
        keys: features of the key/value latent, included in `latents`.
        uncompressed: features of the hidden state if queries are projected from it directly;
            else 0.
        shared: rotary features of the key that all heads share.
        outputs: features of queries, keys and values together.
        reads_alone: whether nothing else keeps the hidden state that queries are projected from.
    """

    latents: int
    keys: int
    uncompressed: int
    shared: int
    outputs: int
    reads_alone: bool = False

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The latents before their norms, and the shared key if it is recomputed from."""
        before = running.element_bytes * self.latents / running.token_parts
        key = running.element_bytes * self.shared / running.token_parts
        key = key if "mla_up_proj" in running.recomputed else 0.0
        again = ("a2a_overlap_attn",)
        return Kept("latents", (before,), again), Kept("shared_key", (key,), again)

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """The latents after their norms.

        Key/value latents that attention keeps count with it instead.
        """
        # Queries that are projected from the hidden state read it apart from the latents.
        apart = self.reads_alone or running.narrows("layernorm")
        of_queries = self.latents - self.keys + (self.uncompressed if apart else 0)
        of_keys = 0 if running.keeps_latents else self.keys
        read = (running.input_bytes * each / running.token_parts for each in (of_queries, of_keys))
        queries = self.latents - self.keys or self.uncompressed
        scaled, again = (queries, self.keys) if running.narrows() else (), ("a2a_overlap_attn",)
        return (Kept("mla_up_proj", (*read,), again, self.moved(running), scaled=scaled),)

    def gathered_narrow(self, running: Running) -> float:
        """See `Operation.gathered_narrow`."""
        whole = self.uncompressed if running.narrows("layernorm") else 0
        return self.latents + whole if running.narrows() else 0.0

    def deferred(self, running: Running) -> float:
        """Gradients of queries, keys and values."""
        return gradient_bytes(running) * self.outputs / running.tensor_parallel

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """As for column-parallel layers of the latents; the shared key is not gathered again."""
        inputs = self.latents + self.uncompressed
        if sequence_parallel:
            return inputs + self.shared, (1 if self.frozen else 2) * inputs + self.shared
        return 0, 2 * (inputs + self.shared)


def latent_projections(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """DeepSeek-V2's MLA: normalised latents, and one rotary key shared by all heads.

    `recomputed_by`: recomputed modules that make their input again.
    """
    h, bias, rank = model.hidden_size, model.add_bias_linear, model.kv_lora_rank
    down: tuple[Weight, ...] = ()
    up = column("self_attn.q_proj", h, model.q_size, bias)
    if model.q_lora_rank is not None:
        down = (
            *whole("self_attn.q_a_proj", h, model.q_lora_rank, bias),
            *norm_weights("self_attn.q_a_layernorm", model, model.q_lora_rank),
        )
        up = column("self_attn.q_b_proj", model.q_lora_rank, model.q_size, bias)
    down += whole("self_attn.kv_a_proj", h, rank + model.qk_pos_emb_head_dim, bias)
    down += norm_weights("self_attn.kv_a_layernorm", model, rank)
    unrotated = model.num_attention_heads * model.qk_head_dim
    up += column("self_attn.kv_b_proj", rank, unrotated + model.v_size, bias)
    return (
        LatentDown(
            "qkv",
            down,
            ("a2a_overlap_attn",),
            QKV,
            inputs=h,
            norms=1 if model.q_lora_rank is None else 2,
            recomputed_by=recomputed_by,
        ),
        LatentUp(
            "mla_up",
            up,
            ("mla_up_proj", "a2a_overlap_attn"),
            QKV,
            latents=(model.q_lora_rank or 0) + rank,
            keys=rank,
            uncompressed=h if model.q_lora_rank is None else 0,
            shared=model.qk_pos_emb_head_dim,
            outputs=model.q_size + model.k_size + model.v_size,
        ),
    )
