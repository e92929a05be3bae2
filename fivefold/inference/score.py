"""Scores continuations of contexts with a model on one device, as multiple-choice tasks ask."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.model.batch import Batch, on_device
from fivefold.model.transformer import Stage

Ids = tuple[int, ...]


class Scorer:
    """Log-probabilities of continuations.

    Inputs are packed: each is a document within one row, so that nothing is padded. Continuations
    that share an input, such as choices of one token, share its computation.

    Args:
        stage: a whole model.
        window: most tokens that it is given; of longer ones the beginning is left out.
        most_tokens: tokens that it is given at once, unless one input has more.
    """

    def __init__(self, stage: Stage, window: int, most_tokens: int) -> None:
        self._stage, self.window, self._most_tokens = stage.eval(), window, most_tokens
        self._device = next(stage.parameters()).device

    def score(self, requests: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        """For each context and continuation, both of at least one token: the natural logarithm of
        the continuation's probability, and whether each of its tokens is the most likely one.

        Raises:
            FivefoldError: a continuation does not fit into the window.
        """
        asked: dict[Ids, list[int]] = {}  # input -> the requests that it answers
        for number, (context, continuation) in enumerate(requests):
            if len(continuation) > self.window:
                raise FivefoldError(
                    f"a continuation of {len(continuation):,} tokens is to be scored, and the "
                    f"model reads {self.window:,}"
                )
            tokens = (*context, *continuation)[-(self.window + 1) :][:-1]
            asked.setdefault(tokens, []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        for inputs in self._packed(asked):
            logits_TV = self._logits(inputs)
            end = 0
            for tokens in inputs:
                end += len(tokens)
                for number in asked[tokens]:
                    targets = torch.tensor(requests[number][1], device=self._device)
                    found[number] = _scored(logits_TV[end - len(targets) : end], targets)
        return [found[number] for number in range(len(requests))]

    def _packed(self, asked: Mapping[Ids, object]) -> Iterator[list[Ids]]:
        """Inputs that are computed together, of similar lengths."""
        together: list[Ids] = []
        for tokens in sorted(asked, key=len, reverse=True):
            if together and sum(map(len, together)) + len(tokens) > self._most_tokens:
                yield together
                together = []
            together.append(tokens)
        if together:
            yield together

    @torch.no_grad()
    def _logits(self, inputs: Sequence[Ids]) -> Tensor:
        """Logits [T, V] of the inputs, end to end, over the vocabulary without padding."""
        tokens_1T = torch.tensor([[token for tokens in inputs for token in tokens]])
        positions_1T = torch.cat([torch.arange(len(tokens)) for tokens in inputs])[None]
        counts = torch.tensor([len(tokens) for tokens in inputs])
        documents_1T = torch.arange(len(inputs)).repeat_interleave(counts)[None]
        places_1T = torch.arange(tokens_1T.shape[1])[None]
        packed = Batch(tokens_1T, tokens_1T, positions_1T, documents_1T, places_1T)
        (batch,) = on_device([packed], self._device)
        return self._stage.logits(batch)[:, : self._stage.model.vocab_size]


def _scored(logits_CV: Tensor, targets_C: Tensor) -> tuple[float, bool]:
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    logs_C = logits_CV.to(wide).log_softmax(-1).gather(1, targets_C[:, None])
    return float(logs_C.sum()), bool((logits_CV.argmax(-1) == targets_C).all())
