"""Generates text from a checkpoint of any layout, on one device or tensor-parallel ones.

Tensor-parallel ranks all run the same loop: each holds its heads, with their keys and values, and
its entries of the vocabulary, whose logits are gathered; the first rank draws tokens for all.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.sources import read_config
from fivefold.data.prompts import encode_prompt
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import CheckpointError, ConfigError, Mistake
from fivefold.inference.decoder import Decoder
from fivefold.inference.text_bounds import TextBounds
from fivefold.layout import Layout
from fivefold.mesh.collectives import integers_from_first
from fivefold.mesh.groups import Groups
from fivefold.model.transformer import Stage
from fivefold.optim.adamw import OPTIMIZER
from fivefold.parallelize import parallelize
from fivefold.train.folder.origin import checkpoints_of
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.folder.run_tokenizer import run_tokenizer
from fivefold.train.folder.saved_state import SavedState, read_state, reading, same_model
from fivefold.train.layout_groups import groups_of
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.machine.threads import choose_threads
from fivefold.train.places import join_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv

LEAST_TEMPERATURE = 1e-30  # fp32 can divide by it
BETWEEN_LOOKS = 0.05  # seconds after which ranks ask again for what a person says


def load_model(run: Path, step: int | None = None) -> tuple[Config, Stage, Tokenizer]:
    """The model of a run on one device, with the weights of one of its checkpoints.

    Raises:
        CheckpointError: the folder is not a run folder, or the checkpoint is missing or damaged.
    """
    config = _config(run)
    tokenizer = run_tokenizer(run, _state(run, step))
    stage = Stage(config.model, training=config.training).eval()
    _fill(stage, run, step, config)
    return config, stage, tokenizer


def sampling_layout(config: Config, ranks: int) -> Layout:
    """The layout of a run's model over tensor-parallel ranks, for sampling.

    Raises:
        ConfigError: so many ranks cannot split it, or it has experts.
    """
    if config.model.num_experts is not None:
        what = f"--tp {ranks}: a model with experts samples on one device"
        raise ConfigError(Mistake(what, works=("--tp 1",)))
    plain = Config(config.model, experts=config.experts)
    names = "seq_length", "seed", "distributed_timeout_minutes"
    kept = {name: getattr(config.training, name) for name in names}
    split = {"tensor_model_parallel_size": ranks, "global_batch_size": 1, "micro_batch_size": 1}
    return check(plain.with_values(**kept, **split, precision="fp32"), ranks)


def load_part(
    run: Path, step: int | None, layout: Layout, env: RankEnv, device: torch.device
) -> tuple[Stage, Groups]:
    """This rank's part of the model of a run, and the groups of its ranks; collective.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    groups = groups_of(layout, env.rank, device.type)
    (stage,) = parallelize(layout, groups, device).stages.values()
    _fill(stage.eval(), run, step, layout.config)
    return stage, groups


def _config(run: Path) -> Config:
    file = RunFolder(run).config_file
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no {file.name}")
    return read_config(file)


def _checkpoints(run: Path) -> Checkpointer:
    return Checkpointer(checkpoints_of(run), step_flag="--step")


def _fill(stage: Stage, run: Path, step: int | None, config: Config) -> None:
    """Load the weights of a checkpoint into a whole model, or a rank's part of it."""
    checkpoints = _checkpoints(run)
    tensors = {name: p.detach() for name, p in stage.named_parameters()}
    tensors |= dict(stage.named_buffers())

    def load(found: int) -> None:
        state = read_state(checkpoints, found)
        same_model(state.model, config.model, checkpoints.folder)
        checkpoints.load(found, tensors, skip=(OPTIMIZER,))

    reading(checkpoints, step, load)


def _state(run: Path, step: int | None) -> SavedState:
    checkpoints = _checkpoints(run)
    return reading(checkpoints, step, partial(read_state, checkpoints))


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_tokens: most tokens to generate; an end of document ends a text earlier.
        temperature: temperature of the softmax; 0 always takes the most likely token.
        top_k: number of most likely tokens to draw from; 0: all.
        top_p: least probability that the most likely tokens to draw from have together.
        seed: seed of the draws; each text has its own.
    """

    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Draw a token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        candidates = torch.arange(len(logits_V))
        if self.top_k:
            logits_V, candidates = logits_V.topk(min(self.top_k, len(logits_V)))
        wide = logits_V.float()
        below = wide - wide.max()  # at most 0, so no quotient overflows to infinity
        probabilities = (below / max(self.temperature, LEAST_TEMPERATURE)).softmax(0)
        if self.top_p < 1:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            candidates = candidates[order]
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities * (before < self.top_p)  # at least the first
        return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


class Sampler:
    """Writes texts with the model of a run.

    Args:
        config: settings of the run.
        stage: its model, or a rank's part of it.
        tokenizer: its tokenizer.
        bounds: tokens that begin and end its texts.
        group: tensor-parallel group; None: one device.
    """

    def __init__(
        self,
        config: Config,
        stage: Stage,
        tokenizer: Tokenizer,
        bounds: TextBounds,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.config, self.tokenizer, self._stage, self._group = config, tokenizer, stage, group
        self._bounds, self._turns = bounds, count()

    @classmethod
    def load(cls, run: Path, step: int | None = None, device: Asked = "auto") -> "Sampler":
        """A sampler on one device, from a checkpoint of a run; the latest if `step` is None.

        Raises:
            CheckpointError: the folder is not a run folder, or the checkpoint is missing or
                damaged.
        """
        chosen = choose_device(device, RankEnv(), 1, visible_gpus())
        config, stage, tokenizer = load_model(run, step)
        bounds = TextBounds.of(run, tokenizer)
        return cls(config, stage.to(chosen.kind), tokenizer, bounds)

    @property
    def prints(self) -> bool:
        """Whether this rank shows the text that all ranks write."""
        return self._group is None or self._group.rank() == 0

    def heard(self, hear: Callable[[], str]) -> str:
        """What the first rank hears, on every rank, however long it takes to come.

        The others ask the store that ranks meet in: a collective would end the run after
        `--distributed-timeout-minutes`, and keeps a GPU busy until then.
        """
        if self._group is None:
            return hear()
        store = dist.PrefixStore(self._group.group_name, dist.distributed_c10d._get_default_store())
        key = f"heard {next(self._turns)}"
        if self.prints:
            store.set(key, json.dumps(hear()))
        while not store.check([key]):
            time.sleep(BETWEEN_LOOKS)
        return str(json.loads(store.get(key)))

    def write(
        self,
        prompts: Sequence[str],
        how: Sampling,
        ends: Collection[int] = (),
        *,
        opened: bool = False,
    ) -> Iterator[list[str]]:
        """Continue prompts together; yields the new text of every prompt each time.

        Args:
            prompts: texts to continue; may be empty.
            how: how tokens are drawn.
            ends: tokens that end a text, apart from those of the model.
            opened: whether prompts have their opening themselves, as a chat template makes it.
        """
        opening, tokenizer = () if opened else self._bounds.opening, self.tokenizer
        encoded = (encode_prompt(tokenizer, prompt) for prompt in prompts)
        rows = [[*opening, *ids] or [tokenizer.eod_id] for ids in encoded]
        model, training = self.config.model, self.config.training
        window = min(training.seq_length, model.max_position_embeddings)
        decoder = Decoder(self._stage, rows, window, self._group)
        draws = [torch.Generator().manual_seed(how.seed + n) for n in range(len(rows))]
        stop = {*self._bounds.ends, *ends}
        texts = [_Text(tokenizer, stop, () if opened else row[-1:]) for row in rows]
        for _ in range(how.max_tokens):
            drawn = self._drawn(decoder.logits(), how, draws)
            yield [text.add(token) for text, token in zip(texts, drawn, strict=True)]
            if all(text.ended for text in texts):
                return
            decoder.add(drawn)

    def _drawn(
        self, logits_BV: Tensor, how: Sampling, draws: Sequence[torch.Generator]
    ) -> list[int]:
        """The next token of each row, which the first rank draws; each rank waits for its device
        once."""
        drawn = [0] * len(draws)
        if self.prints:
            drawn = [how.draw(*each) for each in zip(logits_BV.cpu(), draws, strict=True)]
        return integers_from_first(drawn, self._group, logits_BV.device)


def sample_on_ranks(
    run: Path, step: int | None, ranks: int, asked: Asked, speak: Callable[[Sampler], None]
) -> int:
    """Have tensor-parallel ranks on this machine all do `speak`; returns the exit status.

    Raises:
        CheckpointError: the folder is not a run folder.
        ConfigError: so many ranks cannot split the model, or there are too few GPUs.
    """
    config = _config(run)
    layout = sampling_layout(config, ranks)
    tokenizer = run_tokenizer(run, _state(run, step))
    bounds = TextBounds.of(run, tokenizer)
    device = choose_device(asked, RankEnv(), ranks, visible_gpus())

    def rank(env: RankEnv) -> None:
        here = join_group(layout.config, env, device)
        stage, groups = load_part(run, step, layout, env, here)
        speak(Sampler(config, stage, tokenizer, bounds, groups.tp))

    threads = choose_threads(layout, ranks, device.kind).count
    return run_ranks(rank, ranks, describe=layout.grid.name, threads=threads).status


class _Text:
    """A text that grows token by token, and how much of it has been shown.

    `before` are tokens that it goes on after: many tokenizers leave out a space that comes first.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: Collection[int], before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._ids = [*before]
        self._shown = tokenizer.decode(before)
        self.ended = False

    def add(self, token: int) -> str:
        """The new text; the bytes of one character may come in several tokens, and wait for the
        last one."""
        self.ended = self.ended or token in self._ends
        if self.ended:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
