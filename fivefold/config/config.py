"""The configuration of a run: all settings, in sections."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, get_type_hints

from fivefold.config.data import DataConfig
from fivefold.config.experts import ExpertsConfig
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.records import CheckpointConfig, LoggingConfig
from fivefold.config.settings import Setting, settings_of
from fivefold.config.training import ELEMENT_BYTES, OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Config:
    """All settings of a run. Field names are unique over all sections: each is a flag, too."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def with_values(self, **values: Any) -> "Config":
        """A copy with some settings changed, by field name in any section.

        Raises:
            KeyError: no section has such a field.
        """
        changes: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            changes.setdefault(SECTION_OF[key], {})[key] = value
        return replace(
            self,
            **{name: _changed(getattr(self, name), values) for name, values in changes.items()},
        )

    def with_batch(self, size: int | None = None) -> "Config":
        """A copy in which every step takes `size` sequences; None: the whole batch."""
        size = size or self.training.global_batch_size
        return self.with_values(global_batch_size=size, rampup_batch_size=())

    def value(self, name: str) -> Any:
        """The value of a setting in any section.

        Raises:
            KeyError: no section has such a field.
        """
        return getattr(getattr(self, SECTION_OF[name]), name)

    @property
    def master_bytes(self) -> int:
        """Bytes of an element that the optimizer updates, in the type in which it computes."""
        return max(4, ELEMENT_BYTES[self.training.precision])

    @property
    def rank_tokens(self) -> int:
        """Tokens of a microbatch on a rank, before sequence parallelism splits them."""
        training, parallel = self.training, self.parallel
        return training.micro_batch_size * training.seq_length // parallel.context_parallel_size

    @property
    def product_precision(self) -> str:
        """Precision of the operands of most matrix products: fp4, fp8, or the compute dtype."""
        training = self.training
        narrow = "fp4" if training.fp4_format else "fp8" if training.fp8_format else None
        return narrow or training.precision

    @property
    def narrow_products(self) -> bool:
        """Whether most matrix products have operands of 8 or 4 bits."""
        return self.product_precision in ("fp8", "fp4")

    @property
    def attended_length(self) -> int:
        """Tokens that attend to each other, on average over tokens: of a document, or of a row."""
        return min(self.data.document_length or self.training.seq_length, self.training.seq_length)

    def keeps_latents(self, layer: int) -> bool:
        """Whether a layer's attention saves latents instead of keys and values: because
        context-parallel ranks gather them, or because it reads only those of chosen tokens."""
        softmax = self.model.is_softmax(layer)
        return softmax and self.keeps_latents_by(self.parallel.cp_comm_of(layer))

    def keeps_latents_by(self, kind: str) -> bool:
        """`keeps_latents` for softmax layers whose ranks communicate by this `cp_comm_type`."""
        gathered = kind == "all_gather" and self.parallel.context_parallel_size > 1
        return self.model.multi_latent_attention and (gathered or self.reads_chosen)

    def projects_latents(self, layer: int) -> bool:
        """Whether a layer recomputes keys and values of all latents in its backward."""
        return self.keeps_latents(layer) and not self.reads_chosen

    @property
    def reads_chosen(self) -> bool:
        """Whether attention to chosen tokens (dsa) reads only their latents, rather than all keys
        and values under a mask.

        It does so where that multiplies less, except where the indexer's loss covers all tokens and
        so needs all scores, or where the up-projection has a bias, an adapter or operands of 8 or 4
        bits.
        """
        model = self.model
        if not model.is_sparse or model.add_bias_linear or self.narrow_products:
            return False
        if model.adapts("kv_b_proj"):
            return False
        if model.trains_indexer and not model.dsa_indexer_use_sparse_loss:
            return False
        of_chosen = model.indexer.topk * (2 * model.kv_lora_rank + model.qk_pos_emb_head_dim)
        of_all = self.training.seq_length / 2 * (model.query_dim + model.value_dim)
        return of_chosen < of_all

    def gathers_weights(self, strategy: str | None = None) -> bool:
        """Whether FSDP2 gathers weights in the compute type: from shards or, if some masters are
        off the device, from masters of another type.

        Args:
            strategy: sharding strategy; None: that of the configuration.
        """
        sharded = (strategy or self.parallel.data_parallel_sharding_strategy) != "no_shard"
        return sharded or (self._has_masters and self.memory.optimizer_off_device)

    @property
    def _has_masters(self) -> bool:
        """Whether weights of 16 bits have masters in fp32."""
        return self.training.in_16_bits and not self.optimizer.narrow_parameters

    @property
    def keeps_masters_apart(self) -> bool:
        """Whether weights are stored in 16 bits, with separate masters in the optimizer."""
        return self._has_masters and not self.gathers_weights()

    @property
    def narrow_weights(self) -> bool:
        """Whether weights are stored in 16 bits between steps: beside masters, with remainders, or
        as the masters themselves."""
        return self.optimizer.narrow_parameters or self.keeps_masters_apart

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient element as it is accumulated and kept."""
        return 2 if self.optimizer.narrow_gradients else self.master_bytes

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of a gradient element as data-parallel ranks send it."""
        return 2 if self.parallel.grad_reduce_in_bf16 else self.gradient_bytes

    def sections(self) -> Iterator[tuple[str, Any]]:
        """Section names and their dataclasses."""
        for section in fields(self):
            yield section.name, getattr(self, section.name)


def _changed(section: Any, values: dict[str, Any]) -> Any:
    """The result of `dataclasses.replace`, in a fifth of its time: a search makes tens of
    thousands.

    Sections compute nothing when they are created, and hold only their settings.
    """
    made = object.__new__(type(section))
    vars(made).update(vars(section) | values)
    return made


SECTIONS: Mapping[str, type] = MappingProxyType(get_type_hints(Config))
"""The dataclass of each section."""
SECTION_SETTINGS: Mapping[str, tuple[Setting, ...]] = MappingProxyType(
    {name: tuple(settings_of(cls)) for name, cls in SECTIONS.items()}
)
"""Every setting of a run, by section."""
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {setting.name: setting for settings in SECTION_SETTINGS.values() for setting in settings}
)
SECTION_OF = MappingProxyType(
    {setting.name: name for name, settings in SECTION_SETTINGS.items() for setting in settings}
)
