"""What an error suggests, typed, gets further: the mistake is gone."""

import os
import re
import shlex
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from fivefold.cli.train import Options
from fivefold.config.config import SECTIONS, SETTINGS
from fivefold.config.flags import ALIASES, SWITCHES
from fivefold.config.foreign import foreign_settings, name_of
from fivefold.config.settings import Setting, settings_of
from fivefold.pipeline.schedules.registry import SCHEDULES
from tests.cli.advice import Line, read_message, type_suggestion
from tests.cli.bad_cases import CASES, Case

NO_WORDS = re.compile("stands alone|takes no value|needs a value|unknown flag|unexpected argument")
PYTHON = re.compile(r"\b(None|True|False)\b|\('|',\)")  # values as nobody types them


def line_of(case: Case) -> Line:
    files = dict(case.files)
    if case.recipe is not None:
        files["recipe.toml"] = case.recipe
    argv = shlex.split(case.argv.replace("RECIPE", "recipe.toml"))
    return Line(tuple(argv), files, case.env)


@cache
def answered(argv: tuple[str, ...]) -> tuple[int, str]:
    """What is answered in an empty folder; several mistakes suggest the same lists."""
    with TemporaryDirectory() as folder:
        return Line(argv).answer(Path(folder))


def follow_all(line: Line, folder: Path) -> int:
    """Type each suggestion of each mistake; how many there were."""
    status, message = line.answer(folder)
    assert not PYTHON.search(message), f"{shlex.join(line.argv)}\n{message}"
    count = 0
    mistakes = [*read_message(message)] if status == 2 else []
    before = [told.kind for told in mistakes]
    for told in mistakes:
        for suggestion in told.suggestions:
            count += 1
            typed = type_suggestion(line, told, suggestion)
            alone = not typed.files and not typed.env
            again, said = answered(typed.argv) if alone else typed.answer(folder)
            assert again in (0, 2), said
            kinds = [other.kind for other in read_message(said)] if again else []
            mistyped = [kind for kind in kinds if NO_WORDS.search(kind) and kind not in before]
            if told.what.startswith("unknown flag"):  # the one that was meant has its own values
                mistyped = []
            whole = f"{shlex.join(typed.argv)}\n{message}\n{said}"
            assert told.kind not in kinds and not mistyped, whole
    return count


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_suggestion_mends_its_mistake(case: Case, tmp_path: Path) -> None:
    follow_all(line_of(case), tmp_path)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-megatron.md"


def test_what_megatron_calls_otherwise_is_answered_as_the_page_says(tmp_path: Path) -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Write instead")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) > 8
    for theirs, ours in rows:
        flags = re.findall(r"`(--[\w-]+)", theirs)
        named = re.findall(r"`(--[\w-]+)", ours)
        for flag in flags:
            _, message = Line(("train", "debug", flag)).answer(tmp_path)
            (told,) = read_message(message)
            assert told.what == f"unknown flag {flag}"
            assert told.suggestions or len(message.splitlines()) == 2, message
            assert set(told.suggestions) <= set(named), (flag, told)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("training.steps", "--train-iters"),
        ("optimizer.lr", "--lr"),
        ("checkpoint.interval", "--save-interval"),
        ("activation_checkpoint.mode", "--recompute-granularity"),
        ("parallelism.pipeline_parallel_degree", "--pp"),
        ("parallelism.context-parallel-degree", "--cp"),
        ("trainer.devices", "--nproc"),
        ("model.optim.lr", "--lr"),
        ("zero_optimization.stage", "--data-parallel-sharding-strategy"),
    ],
)
def test_a_setting_is_known_by_the_section_that_others_keep_it_in(
    theirs: str, ours: str, tmp_path: Path
) -> None:
    _, message = Line(("train", "debug", f"--{theirs}", "2")).answer(tmp_path)
    assert message.startswith(f"error: unknown flag --{theirs}, did you mean {ours}?")


FLAGS = re.compile(r"--[\w-]+(?: (?!and\b)[a-z\d_]+)?")  # with a value
SWITCHED = {name for name, setting in SETTINGS.items() if setting.kind is bool}
KNOWN = {*SETTINGS, *SWITCHES, *ALIASES, *(setting.name for setting in settings_of(Options))}
SAID = sorted({(each.meant(KNOWN), each.note) for each in foreign_settings().values()})
OF_OTHERS = {"model", "nodes"}  # of other commands


@pytest.mark.parametrize(("flag", "note"), SAID)
def test_what_is_said_of_a_flag_of_others_can_be_had(flag: str, note: str, tmp_path: Path) -> None:
    """Flags that are named exist. A switch, or a flag with its value, is taken beside what goes
    with it, after at most two mistakes that say what is missing."""
    beside = FLAGS.findall(note)
    assert {name_of(each) for each in [*beside, *([flag] if flag else [])]} <= KNOWN | OF_OTHERS
    if not flag or (" " not in flag and name_of(flag) not in SWITCHED):
        return
    words = " ".join([flag, *(beside if note.startswith("with ") else [])]).split()
    recipe = "demo-moe" if "moe" in flag else "debug"
    line = Line(("train", recipe, "--nproc", "8", "--tp", "2", "--pp", "2", *words))
    for _ in range(3):
        status, message = line.answer(tmp_path)
        for told in [*read_message(message)][: status and 1]:
            missing = [each for each in told.suggestions if not each.startswith("--no-")]
            assert missing, message
            line = replace(line, argv=(*line.argv, *shlex.split(missing[0])))
    assert status == 0, message


DEGREES = ("--tp", "--pp", "--cp", "--dp-shard", "--dp-replicate", "--vpp")
SIZES = ("1", "2", "3", "4", "5", "8", "0", "-1")
RECIPES = (("debug",), ("debug",), ("demo",), ("llama3-8b",), ("--model", "debug-gpt"))


def random_value(random: Random, setting: Setting) -> list[str]:
    """Words that follow a flag, sometimes none that it takes."""
    if random.random() < 0.1:
        return [random.choice(("none", "true", "x", "-1", "0", "1e9", "fp16", "auto"))]
    if setting.name in LAYOUT_TEXTS:
        return [random.choice(LAYOUT_TEXTS[setting.name])]
    if setting.choices:
        count = random.choice((1, 1, 2)) if setting.many else 1
        return random.choices(setting.choices, k=count)
    if setting.many:
        return random.choices(("1", "2", "4", "a.txt"), k=random.choice((1, 2)))
    if setting.kind is float:
        return [random.choice(("0", "0.1", "1", "2.5", "-1", "1e-4"))]
    if setting.kind is int:
        return [random.choice(("0", "1", "2", "3", "4", "5", "7", "8", "12", "48", "64", "100"))]
    return [random.choice(("x", "969,30,1", "1"))]


LAYOUT_TEXTS = {
    "pipeline_model_parallel_layout": (
        "auto",
        "Ett|ttL",
        "Et|t|t|tL",
        "E|t|t|t|t|L",
        "v:Et|t|t|tL",
        "loop:Et|t|t|tL",
        "Ett|tL",
        "Etx",
    ),
    "moe_layer_freq": ("1", "2", "[0]*2+[1]*2", "[1]*3", "x"),
}
# What a preview would wait for, or say the same about for ever.
LEFT_OUT = ("unmodelled", "num_layers", "wandb_project", "tensorboard")


def misspelled(random: Random, flag: str) -> str:
    """A flag with a letter too few, too many or in another place."""
    at = random.randrange(3, len(flag)) if len(flag) > 3 else 2
    return random.choice((flag[:at] + flag[at + 1 :], flag[:at] + "x" + flag[at:], flag[:at]))


def random_line(random: Random) -> Line:
    """A recipe on some ranks, with a few settings that may fit or not."""
    argv = ["train", *random.choice(RECIPES), "--nproc", random.choice("1234678")]
    for flag in random.sample(DEGREES, random.choice((0, 1, 1, 2, 3))):
        argv += [flag, random.choice(SIZES)]
    names = sorted(set(SETTINGS) - set(LEFT_OUT))
    favourites = [*SECTION_NAMES["parallel"], *SECTION_NAMES["memory"]]
    for name in random.choices(names + 3 * favourites, k=random.choice((0, 1, 2, 2, 3))):
        setting = SETTINGS[name]
        if setting.kind is bool:
            flag, values = setting.typed(random.random() < 0.7), []
        else:
            flag, values = setting.flag, random_value(random, setting)
        if random.random() < 0.07:
            flag = misspelled(random, flag)
        argv += [flag, *values]
    if random.random() < 0.1:
        argv += random.choice(MISTYPED)
    return Line(tuple(argv))


SECTION_NAMES = {name: [f.name for f in fields(cls)] for name, cls in SECTIONS.items()}
MISTYPED = tuple([f"--{name.replace('_', '-')}", "2"] for name in foreign_settings())


def test_suggestions_of_random_lines_mend_their_mistakes(tmp_path: Path) -> None:
    random = Random(SEED)
    followed = sum(follow_all(random_line(random), tmp_path) for _ in range(LINES))
    assert followed > LINES


def random_pipeline(random: Random) -> Line:
    """A line of `fivefold schedule`."""
    argv = ["schedule", random.choice([*SCHEDULES, "zb-v", "1f2b"])]
    for flag, values in (
        ("--stages", "123450"),
        ("--microbatches", "1234579"),
        ("--chunks", "123"),
        ("--slices", "124"),
        ("--memory-cap", ("0.5", "1", "2.3", "4")),
        ("--pp", "24"),
    ):
        if random.random() < (0.1 if flag == "--pp" else 0.4):
            argv += [flag, random.choice(values)]
    return Line(tuple(argv))


@pytest.mark.slow
def test_suggestions_for_random_pipelines_mend_their_mistakes(tmp_path: Path) -> None:
    random = Random(SEED)
    followed = sum(follow_all(random_pipeline(random), tmp_path) for _ in range(LINES // 3))
    assert followed > LINES // 3


SEED, LINES = int(os.environ.get("ADVICE_SEED", "0")), int(os.environ.get("ADVICE_LINES", "100"))
