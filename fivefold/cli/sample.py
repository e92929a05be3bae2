"""`fivefold sample`: continue prompts, or a conversation, with a trained model."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.helps import RUN_HELP, STEP_HELP
from fivefold.config.settings import (
    Count,
    NonNegative,
    PositiveShare,
    Whole,
    argument,
    option,
)
from fivefold.config.sources import load_options
from fivefold.errors import DataError, Mistake, Mistakes
from fivefold.files import read_text
from fivefold.report.settings import run_config
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.machine.devices import Asked

if TYPE_CHECKING:
    from fivefold.inference.sample import Sampler, Sampling


@dataclass(frozen=True)
class Options:
    """Continue prompts with the model of a run, whatever layout trained it."""

    run: str = argument(RUN_HELP)
    prompt: str = argument("text to continue", "")
    prompts: str | None = option(None, "file of texts to continue, one per line")
    num_samples: Count = option(1, "texts for each prompt")
    chat: bool = option(
        False, "answer each line of standard input, with the tokenizer's chat template"
    )
    step: int | None = option(None, STEP_HELP)
    max_tokens: Count = option(100, "most tokens to generate")
    temperature: NonNegative = option(
        0.8, "temperature of the softmax; 0: always the most likely token"
    )
    top_k: Whole = option(50, "number of most likely tokens to draw from; 0: all")
    top_p: PositiveShare = option(
        1.0, "draw from the smallest set of tokens with at least this probability"
    )
    seed: Whole = option(0, "seed of the draws")
    device: Asked = option("auto", "where to compute")
    tensor_model_parallel_size: Count = option(
        1,
        "ranks on this machine that split heads, MLPs, vocabulary, and the cached keys and values",
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    _check(options)
    prompts = _prompts(options)
    from fivefold.inference.sample import Sampler, Sampling, sample_on_ranks

    how = Sampling(
        options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed
    )

    folder, ranks = Path(options.run), options.tensor_model_parallel_size

    def speak(sampler: "Sampler") -> None:
        if options.chat:
            _converse(sampler, how, folder)
        else:
            _continue(sampler, how, prompts)

    if ranks > 1:
        return sample_on_ranks(folder, options.step, ranks, options.device, speak)
    speak(Sampler.load(folder, options.step, options.device))
    return 0


def _continue(sampler: "Sampler", how: "Sampling", prompts: list[str]) -> None:
    """Print one text while it is written, or several when all are."""
    if len(prompts) == 1:
        _show(sampler, prompts[0], (new for (new,) in sampler.write(prompts, how)))
        return
    written = [""] * len(prompts)
    for news in sampler.write(prompts, how):
        written = [text + new for text, new in zip(written, news, strict=True)]
    for number, (prompt, text) in enumerate(zip(prompts, written, strict=True), 1):
        if sampler.prints:
            print(f"[{number}] {prompt}{text}", flush=True)


def _show(sampler: "Sampler", begin: str, news: Iterator[str]) -> str:
    """Print a text while it is written, and return what is new."""
    out = sys.stdout if sampler.prints else StringIO()
    written = next(news, "")  # raises here, before any output, if a prompt is wrong
    out.write(begin + written)
    out.flush()
    for new in news:
        written += new
        out.write(new)
        out.flush()
    print(file=out, flush=True)
    return written


def _converse(sampler: "Sampler", how: "Sampling", run: Path) -> None:
    """Answer line by line, each time with the whole conversation so far."""
    from fivefold.data.prompts import end_in
    from fivefold.data.template import ChatTemplate, Message

    template = ChatTemplate.load(_template_of(sampler, run))
    talk: list[Message] = []
    while line := sampler.heard(sys.stdin.readline):
        talk.append({"role": "user", "content": line.rstrip("\n")})
        prompt, _ = template.render(talk, None, "the conversation", prompt=True)
        through, _ = template.render(
            [*talk, {"role": "assistant", "content": "x"}], None, "the conversation"
        )
        after = through.removeprefix(prompt + "x")  # what the template puts after an answer
        ends = end_in(sampler.tokenizer, after) if after != through else ()
        news = sampler.write([prompt], how, ends, opened=True)
        answer = _show(sampler, "", (new for (new,) in news))
        talk.append({"role": "assistant", "content": answer})


def _template_of(sampler: "Sampler", run: Path) -> str:
    """Where the chat template of a run is: beside its tokenizer, or with what came with weights."""
    from fivefold.data.template import FILES, folder_of
    from fivefold.train.folder.side_files import side_file

    said = sampler.config.data.tokenizer_model
    model = None if said is None else str(RunFolder(run).named(said))
    beside = None if model is None else folder_of(model)
    kept = [side_file(run, name) for name in FILES]
    if beside is None or not any((beside / name).exists() for name in FILES):
        model = next((str(file) for file in kept if file is not None), model)
    if model is not None:
        return model
    what = "--chat needs a chat template, and this run has a tokenizer of its own"
    why = "templates come with the tokenizers of chat models (--tokenizer-model)"
    raise DataError(Mistake(what, (why,)))


def _prompts(options: Options) -> list[str]:
    prompts = [options.prompt]
    if options.prompts is not None:
        text = read_text(options.prompts, DataError)
        if not text:
            raise DataError(f"{options.prompts} is empty: it must hold one prompt per line")
        prompts = text.removesuffix("\n").split("\n")  # splitlines: at U+2028 and form feeds, too
    return [prompt for prompt in prompts for _ in range(options.num_samples)]


def _check(options: Options) -> None:
    """Check all that can be checked without loading torch."""
    mistakes = Mistakes()
    given = [bool(options.prompt), options.prompts is not None, options.chat]
    if sum(given) > 1:
        mistakes.add("a prompt, --prompts and --chat exclude each other: give one of them")
    if options.chat and options.num_samples > 1:
        asked = options.num_samples
        what = f"--chat gives one answer to each line, and --num-samples asks for {asked}"
        mistakes.add(what, works=["--num-samples 1"])
    mistakes.raise_if_any()
    run_config(Path(options.run))
