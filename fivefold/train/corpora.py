"""The tokens of a run: its corpora opened for its model. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from fivefold.config.config import Config
from fivefold.config.data import MOCK, DataConfig
from fivefold.data.dataset import check_labels
from fivefold.data.mixture import Source, grouped, parse_named_paths
from fivefold.data.paths import BUILTIN
from fivefold.data.prepare import PreparedData, Progress, prepare
from fivefold.data.rules import checked_sources
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.validation import validation_sets
from fivefold.errors import ConfigError, DataError, Mistake
from fivefold.recipes import FETCH


def check_data_settings(config: Config) -> None:
    """Check the settings of the data for contradictions, without opening a file.

    Raises:
        ConfigError: all mistakes at once.
    """
    _sources(config)


def check_corpora(config: Config) -> None:
    """Check quickly that corpora and tokenizer exist, without reading the text.

    Raises:
        ConfigError, DataError: something is missing, or does not fit the model; the error lists
            everything that is missing.
    """
    settings, sources = config.data, _sources(config)
    missing, instead = list[Mistake](), list[str]()
    try:
        grouped(sources)
    except DataError as error:
        missing += error.mistakes
        if any(source.path in FETCH for source in sources):
            instead.append(f"--data-path {BUILTIN}")
    for name, source in parse_named_paths(settings.valid_data_path).items():
        try:
            grouped([source])
        except DataError as error:
            missing += [
                replace(each, what=f"validation set {name}: {each.what}") for each in error.mistakes
            ]
    try:
        if settings.tokenizer_model is not None:
            _check_vocabulary(config, Tokenizer.load(settings.tokenizer_model))
    except DataError as error:
        missing += error.mistakes
        if settings.tokenizer_model in FETCH and not any(s.indexed_prefix for s in sources):
            instead.append("--tokenizer-model none")
    if instead:
        made_up = [flags.replace(BUILTIN, MOCK) for flags in instead]
        ways = dict.fromkeys(map(" ".join, (instead, made_up)))
        missing[-1] = replace(missing[-1], attempt=" | ".join(ways))
    if missing:
        raise DataError(*missing)


def open_data(config: Config, progress: Progress, tokenizer: Path | None = None) -> PreparedData:
    """Open the tokenised corpora, and tokenise those that are not in the cache.

    Args:
        config: settings of the run.
        progress: called with a line about what is being done.
        tokenizer: file of the tokenizer whose tokens the weights to start from know, in place of
            one that would be trained; None: none is known.

    Raises:
        ConfigError, DataError: the corpora cannot be read, or need another model or length.
    """
    training = config.training
    data = prepare(_settings(config, tokenizer), training.seq_length, training.seed, progress)
    _check_vocabulary(config, data.tokenizer)
    # What is wrong with a split is reported before any process starts.
    check_labels(data.train, data.train.num_samples)
    if training.evaluates:
        validation_sets(training, data)
    return data


def _sources(config: Config) -> list[Source]:
    return checked_sources(config.data, config.training.seed, config.model.vocab_size)


def trains_tokenizer(data: DataConfig) -> bool:
    """Whether a tokenizer is trained on the text because no setting names one."""
    return not (data.tokenizer_model or data.tokenizer_vocab_size or MOCK in data.data_path)


def _settings(config: Config, known: Path | None) -> DataConfig:
    """The data settings, with the known tokenizer, or with the model's vocabulary for one to
    train."""
    data = config.data
    if known is not None and trains_tokenizer(data):
        return replace(data, tokenizer_model=str(known))
    if data.tokenizer_vocab_size is not None:
        return data
    return replace(data, tokenizer_vocab_size=config.model.vocab_size)


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    size, model_size = tokenizer.vocab_size, config.model.vocab_size
    if size > model_size:
        what = f"the tokenizer has {size} tokens, the model {model_size}"
        raise ConfigError(Mistake(what, works=(f"--vocab-size {size}",)))
