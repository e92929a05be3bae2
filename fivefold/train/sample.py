"""Generates text from a checkpoint of any layout, on one device."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.sources import read_config
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import CheckpointError
from fivefold.model.transformer import Stage
from fivefold.train.decoder import Decoder
from fivefold.train.devices import Asked, choose_device, visible_gpus
from fivefold.train.origin import checkpoints_of
from fivefold.train.rank_env import RankEnv
from fivefold.train.run_folder import TOKENIZER
from fivefold.train.saved_state import read_state, same_model


def load_model(run: Path, step: int | None = None) -> tuple[Config, Stage, Tokenizer]:
    """The model of a run on one device, with the weights of one of its checkpoints.

    Raises:
        CheckpointError: the folder is not a run folder, or the checkpoint is missing or damaged.
    """
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} is not a run folder: it has no config.toml")
    config = read_config(run / "config.toml")
    checkpoints = Checkpointer(checkpoints_of(run), step_flag="--step")
    state = read_state(checkpoints, step)
    same_model(state.model, config.model, checkpoints.folder)
    stage = Stage(config.model).eval()
    tensors = {name: p.detach() for name, p in stage.named_parameters()}
    tensors |= dict(stage.named_buffers())
    checkpoints.load(state.step, tensors, skip=("optim.",))
    return config, stage, Tokenizer.load(run / TOKENIZER)


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
        """A token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        candidates = torch.arange(len(logits_V))
        if self.top_k:
            logits_V, candidates = logits_V.topk(min(self.top_k, len(logits_V)))
        probabilities = (logits_V.float() / self.temperature).softmax(0)
        if self.top_p < 1:
            probabilities, order = probabilities.sort(descending=True, stable=True)
            candidates = candidates[order]
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities * (before < self.top_p)  # at least the first
        return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


class Sampler:
    """Writes texts with the model of a run.

    Args:
        run: a run folder.
        step: step of the checkpoint; the latest when None.
        device: where to compute.

    Attributes:
        config: settings of the run.
        tokenizer: tokenizer of the run.

    Raises:
        CheckpointError: the folder is not a run folder, or the checkpoint is missing or damaged.
    """

    def __init__(self, run: Path, step: int | None = None, device: Asked = "auto") -> None:
        chosen = choose_device(device, RankEnv(), 1, visible_gpus())
        self.config, stage, self.tokenizer = load_model(run, step)
        self._stage = stage.to(chosen.kind)

    def write(
        self, prompts: Sequence[str], how: Sampling, ends: Collection[int] = ()
    ) -> Iterator[list[str]]:
        """Continue prompts together; each time, what is new of every text.

        Args:
            prompts: texts to continue; may be empty.
            how: how tokens are drawn.
            ends: tokens that end a text, apart from the end of a document.
        """
        eod, encode = self.tokenizer.eod_id, self.tokenizer.encode_batch
        rows = [[eod, *encode([prompt])[0].tolist()] for prompt in prompts]
        model, training = self.config.model, self.config.training
        window = min(training.seq_length, model.max_position_embeddings)
        decoder = Decoder(self._stage, rows, window)
        draws = [torch.Generator().manual_seed(how.seed + n) for n in range(len(rows))]
        texts = [_Text(self.tokenizer, {eod, *ends}) for _ in rows]
        for _ in range(how.max_tokens):
            drawn = [how.draw(*each) for each in zip(decoder.logits().cpu(), draws, strict=True)]
            yield [text.add(token) for text, token in zip(texts, drawn, strict=True)]
            if all(text.ended for text in texts):
                return
            decoder.add(drawn)


class _Text:
    """A text that grows by tokens, and what of it has been shown."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._ids: list[int] = []
        self._shown = ""
        self.ended = False

    def add(self, token: int) -> str:
        """What is new: bytes of one character may come in several tokens, and wait for the last."""
        self.ended = self.ended or token in self._ends
        if self.ended:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
