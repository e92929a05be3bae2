"""Tasks of lm-evaluation-harness (its package `lm_eval`) over the model of a run."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fivefold.data.prompts import encode_prompt
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import ConfigError, DataError, FivefoldError, Mistake, did_you_mean
from fivefold.inference.sample import load_model
from fivefold.inference.score import Scorer
from fivefold.inference.text_bounds import TextBounds
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.ranks.rank_env import RankEnv

YAML = (".yaml", ".yml")


class HarnessModel(TemplateLM):
    """A model with the interface of the harness: log-likelihoods of continuations and of whole
    texts.

    Texts begin as in the package's own class for Hugging Face: after `opening`, the tokens that
    transformers puts first, if the weights came from there. An empty context is the last of these,
    else an end of document.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, opening: Sequence[int] = ()) -> None:
        super().__init__()
        self._scorer, self._tokens, self._opening = scorer, tokenizer, [*opening]

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokens.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return (self._opening or [self.eot_token_id])[-1]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, after those that texts begin with."""
        ids = encode_prompt(self._tokens, string)
        begun = add_special_tokens is False or ids[:1] == [self.prefix_token_id]
        return ids if begun else [*self._opening, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scorer.score([(tuple(c), tuple(x)) for _, c, x in requests])

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The logarithm of the probability of each text, in windows that do not overlap."""
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._scorer.window, 1
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Refuse: `load_tasks` accepts no task that generates text."""
        raise FivefoldError("tasks that generate text are not evaluated")


def evaluate_tasks(
    run: Path,
    tasks: Sequence[str],
    *,
    step: int | None,
    num_fewshot: int | None,
    limit: int | None,
    device: Asked,
) -> dict[str, Any]:
    """The results of `lm_eval.simple_evaluate` for a checkpoint, on one device, in fp32.

    Args:
        run: a run folder.
        tasks: names of tasks or groups, or paths of their .yaml files.
        step: step of the checkpoint; the latest when None.
        num_fewshot: examples in each context; None: as the task says.
        limit: first documents of each task to evaluate; None: all.
        device: where to compute.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError, DataError: a task is not known, generates text, or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of defaults, many times
    manager = TaskManager()
    specs = load_tasks(manager, tasks)
    config, stage, tokenizer = load_model(run, step)
    chosen = choose_device(device, RankEnv(), 1, visible_gpus())
    length = config.training.seq_length
    window = min(length, config.model.max_position_embeddings)
    scorer = Scorer(stage.to(chosen.kind), window, config.training.micro_batch_size * length)
    found: dict[str, Any] = simple_evaluate(
        model=HarnessModel(scorer, tokenizer, TextBounds.of(run, tokenizer).opening),
        tasks=specs,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    return found


def load_tasks(manager: TaskManager, tasks: Sequence[str]) -> list[str]:
    """Check that tasks exist and score continuations; their names, files with whole paths.

    Raises:
        ConfigError: tasks are not known, or generate text.
        DataError: a task's file or data cannot be read.
    """
    specs = [str(Path(name).resolve()) if name.endswith(YAML) else name for name in tasks]
    for name, spec in zip(tasks, specs, strict=True):
        if name.endswith(YAML) and not Path(spec).is_file():
            raise DataError(f"no task file at {name}")
        if not name.endswith(YAML) and name not in manager.all_tasks:
            what = f"lm_eval has no task {name}{did_you_mean(name, manager.all_tasks)}"
            why = "--tasks takes its names (lm-eval ls tasks), or paths of .yaml files"
            raise ConfigError(Mistake(what, (why,)))
        try:
            loaded: Mapping[str, Any] = manager.load([spec])["tasks"]
        except Exception as error:  # of data sets of others, over a network: anything may happen
            raise DataError(f"the task {name} cannot be loaded: {error}") from error
        writes = [each for each, task in loaded.items() if task.OUTPUT_TYPE == "generate_until"]
        if writes:
            what = f"{', '.join(writes)}: the model would have to write text"
            why = "tasks that choose or score are evaluated: multiple_choice, loglikelihood"
            attempt = (
                "fivefold convert RUN FOLDER; lm_eval --model hf --model_args pretrained=FOLDER"
            )
            raise ConfigError(Mistake(what, (why,), attempt=attempt))
    return specs
