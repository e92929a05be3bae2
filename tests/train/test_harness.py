"""Tasks of lm-evaluation-harness: the numbers of its own class for Hugging Face, on a copy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.cli.main import main
from fivefold.errors import ConfigError, DataError

lm_eval = pytest.importorskip("lm_eval", reason='needs pip install "fivefold[eval]"')

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from fivefold.inference.harness import HarnessModel, load_tasks  # noqa: E402
from fivefold.inference.sample import load_model  # noqa: E402
from fivefold.inference.score import Scorer  # noqa: E402
from fivefold.inference.text_bounds import TextBounds  # noqa: E402
from fivefold.train.folder.convert import to_run  # noqa: E402
from tests.config.families import TINY  # noqa: E402
from tests.config.oracle import InFp64, oracle  # noqa: E402
from tests.train.test_sample_parity import SIZES, backend  # noqa: E402

pytestmark = pytest.mark.slow

LENGTH = 64
TASK = """\
task: numbers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """No network, and no cache outside of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(
            "datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("data"), raising=True
        )
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and beside it `hf`, its copy for transformers."""
    folder = tmp_path_factory.mktemp("run")
    text = "".join(f"The number after {n} is {n + 1}, and not {n + 3}.\n" for n in range(900))
    (folder / "text.txt").write_text(text)
    flags = ["--data-path", f"{folder}/text.txt", "--data-cache-path", f"{folder}/cache"]
    flags += ["--seq-length", str(LENGTH), "--train-iters", "3", "--lr-warmup-iters", "0"]
    flags += ["--precision", "fp64", "--save", f"{folder}/run"]
    assert main(["train", "debug", *flags]) == 0
    assert main(["convert", f"{folder}/run", f"{folder}/hf", "--dtype", "fp64"]) == 0
    return folder / "run"


def task(folder: Path, kind: str = "multiple_choice", metric: str = "acc") -> Path:
    rows = [
        {
            "question": "" if n == 3 else f"The number after {n} is ",
            "choices": [f" {n + 1}", f" {n}, and not the one that was said before", " x"],
            "answer": n % 3,
        }
        for n in range(12)
    ]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / f"{kind}.yaml"
    file.write_text(TASK.format(data=folder / "task.jsonl", kind=kind, metric=metric))
    return file


def both(run: Path) -> tuple[HarnessModel, Any]:
    """Our model in fp64, and that of the harness."""
    _, stage, tokenizer = load_model(run)
    stage = stage.double()
    with InFp64():
        theirs = AutoModelForCausalLM.from_pretrained(run.parent / "hf", dtype=torch.float64)
    with torch.no_grad():  # what fp32 has lost of the weights is lost on both sides
        for parameter in theirs.parameters():
            parameter.copy_(parameter.float())
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(run / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    hf = HFLM(pretrained=theirs, tokenizer=words, max_length=LENGTH, batch_size=3, device="cpu")
    return HarnessModel(Scorer(stage, LENGTH, 100), tokenizer), hf


def asked(kind: str, *texts: tuple[str, ...]) -> list[Instance]:
    return [Instance(kind, {}, arguments, n) for n, arguments in enumerate(texts)]


def test_log_likelihoods_are_those_of_the_harness(run: Path) -> None:
    ours, theirs = both(run)
    long = " ".join(f"{n} is a number" for n in range(40))
    pairs = [("The number after 7 is", " 8"), ("The number after 7 is", " 9, I think")]
    pairs += [("", "a whole text"), (f"{long} and", " then"), ("ends with a space ", "here")]
    requests = asked("loglikelihood", *pairs)
    with InFp64():
        expected = theirs.loglikelihood(requests)
    found = zip(ours.loglikelihood(requests), expected, strict=True)
    for (score, likely), (its_score, its_likely) in found:
        assert score == pytest.approx(its_score, rel=1e-12) and likely == its_likely
    requests = asked("loglikelihood_rolling", (long,), ("short",))
    with InFp64():
        sums = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(sums, rel=1e-12)


def test_a_task_has_the_results_of_the_harness(run: Path, tmp_path: Path) -> None:
    file = str(task(tmp_path))
    found = [
        lm_eval.simple_evaluate(model=each, tasks=[file], num_fewshot=2)["results"]["numbers"]
        for each in both(run)
    ]
    assert found[0] == found[1] and 0 < found[0]["acc,none"] < 1


def test_the_command_says_what_the_task_says(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fivefold", "eval", str(run), "--tasks", str(task(tmp_path))]
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--limit", "6"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.split()[:2] == ["numbers", "acc"] and first.endswith("6 of 12 documents")
    assert last.startswith("  next: fivefold eval ")


def test_tasks_that_cannot_be_evaluated_are_told(tmp_path: Path) -> None:
    manager = TaskManager()
    with pytest.raises(ConfigError, match="no task hellaswagg, did you mean 'hellaswag'"):
        load_tasks(manager, ["hellaswagg"])
    with pytest.raises(DataError, match="no task file at nowhere"):
        load_tasks(manager, ["nowhere.yaml"])
    with pytest.raises(ConfigError, match="numbers: the model would have to write text"):
        load_tasks(manager, [str(task(tmp_path, "generate_until", "exact_match"))])
    file = task(tmp_path)
    (tmp_path / "task.jsonl").unlink()
    with pytest.raises(DataError, match=f"the task {file} cannot be loaded"):
        load_tasks(manager, [str(file)])


def test_texts_begin_as_in_the_harness(tmp_path: Path) -> None:
    """Weights from Hugging Face, whose tokenizer puts a token before each text."""
    made = oracle(TINY["llama"] | SIZES).eval()
    made.save_pretrained(tmp_path / "hub")
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend(begins=True), bos_token="<s>", eos_token="<|endoftext|>"
    )
    words.save_pretrained(tmp_path / "hub")
    to_run(tmp_path / "hub", tmp_path / "run")
    _, stage, tokenizer = load_model(tmp_path / "run")
    with torch.no_grad():  # what fp32 has lost of the weights is lost on both sides
        for parameter in made.parameters():
            parameter.copy_(parameter.float())
    theirs = HFLM(pretrained=made, tokenizer=words, max_length=LENGTH, batch_size=3, device="cpu")
    opening = TextBounds.of(tmp_path / "run", tokenizer).opening
    ours = HarnessModel(Scorer(stage.double(), LENGTH, 100), tokenizer, opening)
    pairs = [("the cat", " sat"), ("", "on the mat"), ("<s>the", " <|im_end|> mat")]
    requests = asked("loglikelihood", *pairs)
    rolling = asked("loglikelihood_rolling", ("the cat sat " * 20,), ("mat",))
    with InFp64():
        expected = theirs.loglikelihood(requests)
        sums = theirs.loglikelihood_rolling(rolling)
    for (score, likely), other in zip(ours.loglikelihood(requests), expected, strict=True):
        assert (score, likely) == (pytest.approx(other[0], rel=1e-12), other[1])
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(sums, rel=1e-12)
