"""Generates text from a checkpoint of any layout, on one device."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.sources import read_config
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import CheckpointError, ConfigError
from fivefold.model.batch import Batch
from fivefold.model.transformer import Stage
from fivefold.train.origin import checkpoints_of
from fivefold.train.run import TOKENIZER
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


def sample(
    run: Path,
    prompt: str,
    *,
    step: int | None = None,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Continue a prompt; yields the text in pieces, as it is generated.

    The checkpoint is loaded before the first piece.

    Args:
        run: a run folder.
        prompt: text to continue; may be empty.
        step: step of the checkpoint; the latest when None.
        max_tokens: most tokens to generate; an end of document ends the text earlier.
        temperature: temperature of the softmax; 0 always takes the most likely token.
        top_k: number of most likely tokens to draw from; 0: all.
        seed: seed of the draws.
    """
    if temperature < 0 or top_k < 0 or max_tokens < 1:
        raise ConfigError(
            f"temperature {temperature} and top_k {top_k} must be 0 or more, max_tokens "
            f"{max_tokens} at least 1"
        )
    config, stage, tokenizer = load_model(run, step)
    window = min(config.training.seq_length, config.model.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        return _draw(logits, temperature, top_k, generator)

    return _written(stage, tokenizer, prompt, window, max_tokens, draw)


@torch.no_grad()
def _written(
    stage: Stage,
    tokenizer: Tokenizer,
    prompt: str,
    window: int,
    max_tokens: int,
    draw: Callable[[Tensor], int],
) -> Iterator[str]:
    ids = [tokenizer.eod_id, *tokenizer.encode_batch([prompt])[0].tolist()]
    written = len(ids)
    shown = ""
    for _ in range(max_tokens):
        logits = stage.logits(None, _batch(ids[-window:]))[-1, : tokenizer.vocab_size]
        token = draw(logits)
        if token == tokenizer.eod_id:
            break
        ids.append(token)
        # Bytes of one character may come in several tokens: wait until they decode.
        text = tokenizer.decode(ids[written:])
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def _batch(ids: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    return Batch(tokens, tokens, positions, None, positions)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits, candidates = logits.topk(min(top_k, len(logits)))
    else:
        candidates = torch.arange(len(logits))
    probabilities = (logits.float() / temperature).softmax(0)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])
