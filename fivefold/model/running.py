"""How a layer is run, as far as what it keeps and computes depends on it; torch-free."""

from dataclasses import dataclass, field
from math import inf

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.training import ELEMENT_BYTES


@dataclass(frozen=True)
class Running:
    """Degrees, types and memory techniques under which a layer runs on one rank.

    Attributes:
        seq_length: tokens that a token may attend to; matters to attention that is not fused.
        element_bytes: bytes of a number of the compute type.
        input_bytes: bytes of a number of a linear layer's kept input; fewer in fp8, fp4.
        tensor_parallel: ranks that split heads, MLPs and vocabulary.
        sequence_parallel: whether these ranks split the tokens of everything else.
        expert_tensor_parallel: ranks that split each expert.
        imbalance: tokens of this rank's experts, over their even share.
        fused_attention: whether a kernel without the S x S matrix computes attention; dropping
            probabilities needs the matrix.
        memory: techniques that recompute, offload or fuse.
        microbatch_tokens: tokens that pass a layer at once on this rank, before sequence
            parallelism splits them; the fewer, the more tensors are too small to be offloaded.
    """

    seq_length: int
    element_bytes: float = 2
    input_bytes: float = 2
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_tensor_parallel: int = 1
    imbalance: float = 1.0
    fused_attention: bool = True
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    microbatch_tokens: float = inf

    @classmethod
    def of(
        cls, config: Config, *, imbalance: float = 1.0, fused_attention: bool = True
    ) -> "Running":
        """As a configuration says, which names its degrees of tensor parallelism."""
        training, parallel = config.training, config.parallel
        element = ELEMENT_BYTES[training.precision]
        parts = parallel.context_parallel_size * parallel.num_sequence_slices
        narrow = 0.5 if training.fp4_format else 1 if training.fp8_format else element
        return cls(
            seq_length=training.seq_length,
            element_bytes=element,
            input_bytes=narrow,
            tensor_parallel=parallel.tensor_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            expert_tensor_parallel=parallel.expert_tensor_parallel_size,
            imbalance=imbalance,
            fused_attention=fused_attention,
            memory=config.memory,
            microbatch_tokens=training.micro_batch_size * training.seq_length / parts,
        )

    @property
    def remade(self) -> tuple[str, ...]:
        """Modules (Megatron's names) that the backward makes again."""
        memory = self.memory
        return memory.recompute_modules if memory.recompute_granularity == "selective" else ()

    @property
    def token_parts(self) -> int:
        """Parts into which tokens are split outside of heads, MLPs and vocabulary."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def by_heads(self, features: int) -> float:
        """Bytes per token of features that are divided with the query heads."""
        return self.element_bytes * (features / self.tensor_parallel)

    def by_key_heads(self, features: int, heads: int) -> float:
        """Bytes per token of features that are divided with key or value heads: a rank has one of
        these at least."""
        return self.element_bytes * (features / min(self.tensor_parallel, heads))

    def copies(self, experts: int) -> float:
        """Rows that leave this rank for each token of the microbatch that is sent to so many
        experts."""
        return experts / self.token_parts

    def rows(self, experts: int) -> float:
        """Rows that reach this rank's experts for each such token, those of other ranks of the same
        expert included."""
        return self.copies(experts) * self.expert_tensor_parallel * self.imbalance

    def rows_of_one(self, experts: int) -> float:
        """Rows of which this rank computes its part, for each such token."""
        return experts * self.imbalance / self.token_parts
