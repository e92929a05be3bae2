"""Loads the batches of one data-parallel rank; resumable, the same samples for every layout."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypedDict

from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.config import SETTINGS
from fivefold.config.data import IGNORED
from fivefold.data.dataset import Dataset, content
from fivefold.data.packing import Microbatch
from fivefold.errors import DataError, Mistake


class LoaderState(TypedDict):
    """A place in the data.

    Attributes:
        consumed_samples: number of samples of all ranks before the next batch.
        fingerprint: the `Dataset.fingerprint` of the data.
    """

    consumed_samples: int
    fingerprint: dict[str, Any]


class Loader:
    """Steps through a dataset, one global batch per step.

    A step takes the next samples, as many as `batch_sizes` says; data-parallel rank r gets the
    r-th of dp_size equal consecutive parts. So the samples of a batch do not depend on the layout,
    and the number of consumed samples is enough to resume, also with another layout or batch size.
    For a fixed validation set, use an unshuffled dataset and `seek(0)` before each pass.

    Attributes:
        consumed_samples: number of samples of all ranks handed out so far.
        batch_samples: number of samples of all ranks in the latest batch.
        data_wait_s: seconds that the last `next_batch` waited for data.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_sizes: BatchSizes,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        prefetch: bool = True,
        end: int | None = None,
    ) -> None:
        """With `prefetch`, a thread (started by the first batch) prepares one batch ahead.

        Global samples from `end` on have no labels: they fill the last batch of a whole pass.
        """
        unit = micro_batch_size * dp_size
        assert not any(size % unit for size in batch_sizes.sizes()), "batch_rules asks for it"
        self._dataset = dataset
        self._batch_sizes = batch_sizes
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._prefetch = prefetch
        self._end = end
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: Future[list[Microbatch]] | None = None
        self.consumed_samples = self.batch_samples = 0
        self.data_wait_s = 0.0

    def next_batch(self) -> list[Microbatch]:
        """This rank's microbatches of the next step: its samples / (dp_size * micro_batch_size)."""
        began = time.perf_counter()
        if self._ahead is None:
            batch = self._read(self.consumed_samples, self._dp_rank)
        else:
            batch, self._ahead = self._ahead.result(), None
        self.batch_samples = self._batch_sizes.at(self.consumed_samples)
        self.consumed_samples += self.batch_samples
        if self._prefetch:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="fivefold-data")
            self._ahead = self._thread.submit(self._read, self.consumed_samples, self._dp_rank)
        self.data_wait_s = time.perf_counter() - began
        return batch

    def batch_of(self, dp_rank: int) -> list[Microbatch]:
        """The microbatches that another data-parallel rank got in the step of this rank's latest
        batch."""
        return self._read(self.consumed_samples - self.batch_samples, dp_rank)

    def _read(self, consumed_samples: int, dp_rank: int) -> list[Microbatch]:
        each = self._batch_sizes.at(consumed_samples) // self._dp_size
        first = consumed_samples + dp_rank * each
        starts = range(first, first + each, self._micro_batch_size)
        return [self._microbatch(start) for start in starts]

    def _microbatch(self, start: int) -> Microbatch:
        batch = self._dataset.microbatch(range(start, start + self._micro_batch_size))
        if self._end is not None:
            batch.labels_BS[max(self._end - start, 0) :] = IGNORED
        return batch

    def seek(self, consumed_samples: int) -> None:
        """Make the next batch start at this global sample."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        self.consumed_samples = consumed_samples

    def state_dict(self) -> LoaderState:
        """The position of the next batch, and the fingerprint of the data."""
        return {
            "consumed_samples": self.consumed_samples,
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from the position at which `state_dict` was taken.

        Raises:
            DataError: the data, its order or its tokens have changed.
        """
        saved, now = state["fingerprint"], self._dataset.fingerprint
        was, is_ = _unnamed(saved), _unnamed(now)
        changed = [key for key in {**was, **is_} if was.get(key) != is_.get(key)]
        if changed:
            said = {key: SETTINGS[key].words if key in SETTINGS else str for key in changed}
            lines = [
                f"{k}: was {say(saved.get(k))}, is {say(now.get(k))}" for k, say in said.items()
            ]
            what = f"cannot resume after {state['consumed_samples']} samples: the data is not what "
            then = "it resumes with the same data and settings; --finetune takes only the weights "
            then += "of --load, and starts the data afresh"
            what += "it was when the checkpoint was saved"
            raise DataError(Mistake(what, (*lines, then)))
        self.seek(state["consumed_samples"])

    def close(self) -> None:
        """Stop the thread, if there is one; the loader may be used again."""
        self.seek(self.consumed_samples)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _unnamed(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without the names of corpora, which may have moved."""
    data = fingerprint.get("data")
    if not isinstance(data, list):
        return fingerprint
    return fingerprint | {"data": [content(str(identity)) for identity in data]}
