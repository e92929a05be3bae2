"""A replay of nanotron v0.5 (early 2025): its Llama, its ZeRO-1, DistributedDataParallel.

Sources: nanotron's models/llama.py, parallel/tensor_parallel/functional.py,
optim/gradient_accumulator.py, optim/zero.py and trainer.py. It reports
`torch.cuda.max_memory_reserved` of global rank 0, in GiB though labelled GB.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property
from math import inf, prod

from fivefold.config.config import Config
from fivefold.description.shape import layer_weights
from fivefold.layout import Layout
from fivefold.pipeline.split.stages import layout_of_counts
from fivefold.published.replay.step import Replay, weight_shapes
from fivefold.published.replay.tape import Op

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


class Nanotron(Replay):
    """A replay of the memory of one nanotron step.

    Gradients are in bf16 until the end of a backward, and are then added to one fp32 buffer. With
    ZeRO-1 that buffer is reduced as a whole, and the updated shards are gathered through flat
    copies; without it DistributedDataParallel has buckets in bf16. Asynchronous tensor parallelism
    sends tensors that are recorded on NCCL's stream.
    """

    communicators = 8  # world, data, tensor, pipeline, model, expert, context, tied weights
    reports_first = True
    lead = 64  # 1024 launches, the depth of CUDA's queue, at some 16 a collective, events included

    def __init__(self, layout: Layout, pp_rank: int, capacity: float = inf) -> None:
        super().__init__(layout, pp_rank, capacity)
        self._fresh: list[Hashable] = []

    @cached_property
    def weights(self) -> dict[Hashable, float]:
        """Number of elements of each parameter."""
        found: dict[Hashable, float] = {}
        for stage, parts in self.stages.items():
            for place, layer in enumerate(parts.layers):
                for name, shape in weight_shapes(self.layout, layer).items():
                    *_, module, _ = name.split(".")
                    key = (stage, place, _FUSED.get(module, module))
                    found[key] = found.get(key, 0) + prod(shape)
            if parts.embedding:
                found[stage, "embedding"] = self.vocabulary
            untied = self.layout.config.model.untie_embeddings_and_output_weights
            if parts.head and (untied or not parts.embedding):
                found[stage, "head"] = self.vocabulary
        return found

    @cached_property
    def layer(self) -> Sequence[Op]:
        """TritonRMSNorm, one projection to q, k and v, rotary out of place, an unfused SwiGLU."""
        z, model, tp = self.sizes, self.layout.config.model, self.layout.grid.tp
        hidden = 2 * model.hidden_size / tp  # bytes of a row of weights, as each rank has it
        heads = model.q_size + model.k_size + model.v_size
        buffer = z.gathered if tp > 1 else 0.0
        several = self.layout.config.training.micro_batch_size > 1
        mixed = z.query + 2 * z.key
        ops = [
            Op("norm1", z.hidden, ("x",), ("x",)),
            Op("qkv", mixed, ("norm1",), ("norm1",), weight=hidden * heads, buffer=buffer),
            Op("split", mixed, ("qkv",)),
            Op("kv_cat", 2 * z.key, ("split",)),
            Op("kv", 2 * z.key, ("kv_cat",)),
            Op("q", z.query, ("split",)),
            Op("statistics", z.statistics, ()),
            Op(
                "mixed",
                z.query,
                ("q", "kv"),
                ("q", "kv", "mixed", "statistics"),
                backward_scratch=(2 * z.query,),  # dQ in fp32
            ),
            # Sequences come first outside of attention: with several of them that is a copy.
            *([Op("flat", z.query, ("mixed",))] if several else []),
        ]
        flat = "flat" if several else "mixed"
        return [
            *ops,
            Op(
                "o",
                z.hidden,
                (flat,),
                (flat,),
                weight=hidden * model.attention_size,
                buffer=buffer,
                outlives=("qkv", "split"),
            ),
            Op("middle", z.hidden, ("x", "o"), passes=True),
            Op("norm2", z.hidden, ("middle",), ("middle",)),
            Op(
                "up",
                2 * z.inner,
                ("norm2",),
                ("norm2",),
                weight=2 * hidden * model.ffn_size,
                buffer=buffer,
            ),
            Op("silu", z.inner, ("up",), ("up",)),
            Op("product", z.inner, ("silu", "up"), ("silu", "up")),
            Op(
                "down",
                z.hidden,
                ("product",),
                ("product",),
                weight=hidden * model.ffn_size,
                buffer=buffer,
            ),
            Op("y", z.hidden, ("middle", "down"), passes=True, outlives=("o",)),
        ]

    @cached_property
    def loss(self) -> Sequence[Op]:
        """Logits are widened, shifted into a second fp32 tensor, and that becomes the gradient."""
        z = self.sizes
        buffer = z.gathered if self.layout.grid.tp > 1 else 0.0
        return [
            Op("norm", z.hidden, ("x",), ("x",)),
            Op(
                "logits",
                2 * z.entries,
                ("norm",),
                ("norm",),
                weight=2 * self.vocabulary,
                buffer=buffer,
            ),
            Op("wide", 4 * z.entries, ("logits",)),
            Op("y", 4 * z.entries, ("wide",), ("y",), recycles=True),
        ]

    def build(self) -> None:
        """bf16 weights, one fp32 buffer of gradients and one of masters, DDP's buckets."""
        for name, size in self.weights.items():
            self.memory.allocate(("weight", name), 2 * size)
        if self._is_ddp:
            for name, size in self.weights.items():
                self.memory.allocate(("bucket", name), 2 * size)
        whole = sum(self.weights.values())
        self.memory.allocate("gradients", 4 * whole)
        self.memory.allocate("masters", 4 * whole / self.shards)

    def after_backward(self, stage: int, place: int, mb: int, weights: list[Hashable]) -> None:
        """Keep the gradients until the end of the backward."""
        self._fresh += weights

    def end_backward(self, stage: int, mb: int, weights: list[Hashable]) -> None:
        """Add all gradients to the fp32 buffer."""
        self.tape.free((*self._fresh, *weights))
        self._fresh.clear()

    def update(self, *, is_first: bool) -> None:
        """Create the moments in the first step; with ZeRO-1 gather weights through two copies."""
        self.memory.reset()  # its logs of memory do so
        if is_first:
            for name, size in self.weights.items():
                for moment in (1, 2):
                    self.memory.allocate(("moment", moment, name), 4 * size / self.shards)
        if self.shards > 1:
            whole = 2 * sum(self.weights.values())
            parts = [whole / self.shards] * (1 + self.shards) + [whole]
            self.tape.free([self.tape.make(size) for size in parts])

    @property
    def _is_ddp(self) -> bool:
        return self.shards == 1 and self.layout.grid.dp > 1


def by_weights(config: Config, stages: int) -> str:
    """The layout of stages with equal shares of all weights except the embedding's; a layer belongs
    to the share in which it begins."""
    model = config.model
    layer = sum(weight.size for weight in layer_weights(model, 0).values() if weight.multiplies)
    whole = model.num_layers * layer + model.padded_vocab_size * model.hidden_size
    of = [number * layer * stages // whole for number in range(model.num_layers)]
    return layout_of_counts([of.count(stage) for stage in range(stages)])
