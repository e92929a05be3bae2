"""Whatever settings are fixed, the planner answers, or says why not and what would do instead.

Hundreds of questions from a seed: every layout setting, models, clusters and numbers of GPUs. Those
are small, so that a question takes a tenth of a second.
"""

import contextlib
import io
import random
import re
import shlex
from itertools import count

import numpy as np
import pytest

from fivefold.check import check, lacking
from fivefold.cli.main import main
from fivefold.cli.plan_options import Options, planned_request
from fivefold.config.config import SECTION_SETTINGS, Config
from fivefold.config.divisors import divisors
from fivefold.config.presets import PRESETS
from fivefold.config.settings import Setting
from fivefold.config.sources import load_with_origins
from fivefold.errors import ConfigError
from fivefold.hardware import GPUS
from fivefold.mesh.degrees import DEGREES
from fivefold.predict.cluster import preset
from fivefold.search.bound_tables import Ranks
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import memory_bound
from fivefold.search.memory_choices import further_choices
from fivefold.search.request import FIXABLE, Request
from fivefold.search.search import legal_space, search
from fivefold.search.space import FIELDS
from fivefold.search.time_bound import quick_time_bound, time_bound
from fivefold.search.trained import trained
from fivefold.tell.answer import answer, next_commands, reasons
from fivefold.tell.effects import effects
from fivefold.tell.explain import sensitivities
from fivefold.tell.infeasible import why_nothing
from fivefold.tell.record import as_json
from fivefold.tell.report import context, memory_table, others, ranked, traded
from tests.verify.cases import chosen

QUESTIONS = 8  # of each kind; `-m exhaustive` asks a thousand
SUGGESTING = (2_005, 2_008, 2_010, 2_013)  # seeds of questions that are answered with a no
ROWS = 30  # layouts of each part that are looked at
MODELS = ("debug-llama", "debug-gpt", "debug", "gpt2", "deepseek-v2-lite", "mixtral-8x7b")
PYTHON = re.compile(r"\b(None|True|False)\b|\('|',\)")  # values as nobody types them
SIZES = (1, 1, 2, 2, 3, 4, 4, 6, 8, 16, -1, 0)
VALUES = {
    "global_batch_size": (1, 2, 3, 6, 8, 16),
    "seq_length": (1, 63, 64, 256, 500, 512),
    "optimizer_offload_fraction": (0.25, 0.5, 1),
    "pipeline_in_flight_limit": (0, 0.5, 2, 4),
    "pipeline_model_parallel_layout": ("auto", "E|t*2|t*2L", "Ettt|tL", "v:Et|t|t|tL", "EttttL"),
}
SETTINGS: dict[str, Setting] = {
    s.name: s
    for section in SECTION_SETTINGS.values()
    for s in section
    if s.name in FIXABLE | {"global_batch_size", "seq_length", "precision", "fp8_format"}
}


def value_of(setting: Setting, rng: random.Random) -> str:
    if setting.optional and rng.random() < 0.1:
        return "none"
    choices = setting.choices or VALUES.get(setting.name, SIZES)
    return " ".join(
        str(rng.choice(choices)) for _ in range(rng.choice((1, 2)) if setting.many else 1)
    )


def line_of(seed: int) -> str:
    """A command line with up to six settings fixed."""
    rng = random.Random(seed)
    gpus = rng.choice((1, 1, 2, 2, 3, 4, 5, 8, 8, 12, 16))
    words = [
        rng.choice(MODELS),
        "--cluster",
        shlex.quote(rng.choice(list(GPUS))),
        "--gpus",
        str(gpus),
    ]
    words += ["--gbs", "16", "--seq-length", "256"]
    for name in rng.sample(sorted(SETTINGS), rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        setting = SETTINGS[name]
        if setting.kind is bool:
            words.append(setting.typed(rng.random() < 0.7))
        else:
            words += [setting.flag, value_of(setting, rng)]
    return " ".join(words)


def asked(line: str) -> Request:
    return planned_request(load_with_origins(shlex.split(line), Options, models=True), None)[0]


def told(line: str) -> ConfigError | None:
    """The no to a question, if it has no answer; an answer is legal, fits, and can be told."""
    try:
        found = search(asked(line))
        if not found.found:
            return why_nothing(found)
    except ConfigError as error:
        return error
    layout = found.best.layout
    check(layout.config, layout.grid.world_size, planned=True)
    assert found.best.memory.fits
    changes = sensitivities(found)
    rows = [*answer(found), *reasons(found, changes), *ranked(found, 5), *others(found)]
    rows += [*traded(found), *effects(found, changes)]
    lines = [*(cell for row in rows for cell in row), *memory_table(found.best), *context(found)]
    lines += next_commands(found, "x", shlex.split(line))
    assert not re.search(rf"\bnan\b|\binf\b|{PYTHON.pattern}", " ".join(lines))
    assert as_json(found, 1e9, 3)["layouts"]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("part", chosen(range(4), 0, 1))
def test_every_question_is_answered_or_refused_without_a_traceback(part: int) -> None:
    answers = 0
    for seed in range(part, QUESTIONS, 4):
        no = told(line_of(seed))
        answers += no is None
        assert not PYTHON.search(str(no or "")), f"{line_of(seed)}\n{no}"
    assert answers


def typed(line: str, suggestion: str) -> str:
    """The command line as somebody types it who was told "--gpus 4 without --zero-stage"."""
    more, _, gone = suggestion.partition("without ")
    words: list[str] = []
    leaves_out = False
    for word in shlex.split(line):
        if word.startswith("--"):
            leaves_out = word.replace("--no-", "--", 1) in gone.split() or word in gone.split()
        if not leaves_out:
            words.append(word)
    assert not gone or words != shlex.split(line)
    return f"{shlex.join(words)} {more}"


def check_suggestions(line: str) -> int:
    """What a no says that works, works: a plan, or at least this mistake is gone."""
    error = told(line)
    suggestions = 0
    for mistake in error.mistakes if error else ():
        no_plan = mistake.what.startswith("no layout")
        assert mistake.works or not no_plan, line
        for suggestion in mistake.works:
            suggestions += 1
            after = told(typed(line, suggestion))
            if no_plan:
                assert after is None, f"{line} | {suggestion}: {after}"
            elif after is not None:
                assert mistake.what not in [m.what for m in after.mistakes], (line, suggestion)
    return suggestions


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chosen([SUGGESTING, (2_004, *SUGGESTING)], SUGGESTING), ids=str)
def test_what_a_no_suggests_works_when_typed(seeds: tuple[int, ...]) -> None:
    assert sum(check_suggestions(line_of(seed)) for seed in seeds) > 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(32))
def test_what_every_no_suggests_works_when_typed(part: int) -> None:
    assert sum(check_suggestions(line_of(seed)) for seed in range(part, 1_000, 32)) > 12


def is_legal(config: Config, world: int) -> bool:
    try:
        check(config, world, planned=True)
    except ConfigError:
        return False
    return True


def mesh_of(world: int, rng: random.Random) -> dict[str, int]:
    """Degrees whose product is the world."""
    mesh = {}
    for name in rng.sample(sorted(DEGREES.values()), len(DEGREES)):
        mesh[name] = rng.choice(divisors(world))
        world //= mesh[name]
    mesh[name] *= world
    return mesh


@pytest.mark.slow
@pytest.mark.parametrize("part", chosen(range(2), 0))
def test_what_is_legal_is_enumerated(part: int) -> None:
    """What `check` lets pass, asked for in full, has a row: the space leaves nothing out."""
    rng, legal = random.Random(part), 0
    others = sorted(set(SETTINGS) - set(DEGREES.values()))
    for _ in range(550):
        world = rng.choice((1, 2, 4, 6, 8, 16))
        words = [rng.choice(("debug", "debug-gpt", "mixtral-8x7b")), "--gpus", str(world)]
        words += ["--gbs", "48", "--seq-length", "512", "--ep", str(rng.choice((1, 1, 2, 4)))]
        words += [SETTINGS[name].typed(size) for name, size in mesh_of(world, rng).items()]
        for name in rng.sample(others, rng.randrange(4)):
            setting = SETTINGS[name]
            if setting.kind is bool:
                words.append(setting.typed(rng.random() < 0.7))
            else:
                words += [setting.flag, shlex.quote(value_of(setting, rng))]
        line = " ".join(words)
        with contextlib.suppress(ConfigError):
            here = asked(line)
            check(here.config, world, planned=True)
            legal += 1
            assert len(legal_space(here)), line
    assert legal > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_is_enumerated_is_legal_and_has_what_was_given(part: int) -> None:
    """`check` lets every row pass, with the degrees and the settings that the space says."""
    rows = 0
    for seed in count(1_000 + part, 4):
        if rows > ROWS:
            break
        try:
            here = asked(line_of(seed))
        except ConfigError:
            continue
        space = legal_space(here)
        rng = np.random.default_rng(seed)
        for row in rng.choice(len(space), min(6, len(space)), replace=False).tolist():
            config = space.config_of(row)
            if config.parallel.pipeline_schedule == "synthesised":
                continue  # takes a second to find
            layout = check(config, here.world, planned=lacking(config) > 0)
            partition = space.partitions[int(space.columns["partition"][row])]
            assert (layout.split, layout.schedule) == (partition.split, partition.schedule)
            for axis, name in FIELDS.items():
                section = config.training if axis == "mbs" else config.parallel
                assert getattr(section, name) == space.columns[axis][row]
            for name, value in here.fixed().items():
                if value != "auto":  # of which the planner says what it is
                    sections = [vars(section) for _, section in config.sections()]
                    assert any(section.get(name, section) == value for section in sections), name
            rows += 1


@pytest.mark.parametrize(
    "line",
    [
        "deepseek-v2-lite --gpus 4",  # queries that are made again of what the norm discards
        "deepseek-v2-lite --gpus 8 --cp 2 --seq-length 16384 --fp8-format e4m3",
        "deepseek-v3 --gpus 64 --cp 2 --cp-comm-type all_gather --pp 4",
        "llama3-8b --gpus 8 --compile",
        "debug --gpus 4 --tp-comm-overlap",
        "deepseek-v2-lite --gpus 4 --moe-shared-expert-overlap",
        "mixtral-8x7b --gpus 8 --moe-enable-deepep --moe-expert-rank-capacity-factor 2",
        "debug --gpus 4 --microbatch-group-size-per-virtual-pipeline-stage 4",
        "debug --gpus 4 --check-loss-across-dp-replicas-interval 2",
        "deepseek-v2-lite --gpus 8 --check-weight-hash-across-dp-replicas-interval 2",
        "debug --gpus 4 --log-straggler",
    ],
)
def test_what_the_trainer_lacks_is_not_chosen(line: str) -> None:
    """Settings that were not given are among those that go together in the trainer, too."""
    here, rng = asked(f"{line} --gbs 32"), np.random.default_rng(1)
    space = legal_space(here)
    assert len(space)
    further = space.with_memory(further_choices(here.config, here.given))
    for rows in (space, trained(further, like=space)):
        for row in rng.choice(len(rows), min(20, len(rows)), replace=False).tolist():
            check(rows.config_of(row), here.world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("debug --gpus 1", None),
        ("debug --gpus 1 --use-distributed-optimizer", None),
        ("debug --gpus 2 --tp 1 --pp 1 --gbs 1", None),  # context parallelism of short slices
        ("debug --gpus 2 --pipeline-model-parallel-layout auto --pp 2", None),
        ("debug --gpus 2 --pipeline-schedule zb_v --vpp 2", None),
        ("debug --gpus 1 --pipeline-schedule zb_v", None),
        ("debug --gpus 2 --pp 2 --num-sequence-slices 2", None),
        ("debug --gpus 8 --dp-shard 2 --dp-replicate 2 --use-distributed-optimizer", None),
        ("debug --gpus 2 --tp -1", None),
        ("debug --gpus 2 --cp 2 --num-sequence-slices 2", "both cut every sequence"),
        (
            "llama3-8b --gpus 8 --mbs 1 --recompute-granularity full --cross-entropy-loss-fusion",
            None,
        ),
        ("llama3-8b --gpus 16 --pp 1 --cp-comm-type a2a+p2p --seq-length 65536 --gbs 16", None),
        ("llama3-70b --gpus 4 --tp 1 --pp 1 --cp 1 --gbs 4 --mbs 1", "--offload-optimizer-states"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)  # as what fits nowhere in test_search
            for row in (
                ("llama3-405b --gpus 4 --tp 1 --pp 1 --cp 1 --gbs 4 --mbs 1", "--gpus 128"),
                ("llama3-70b --gpus 1 --gbs 1", "more than the device has"),
            )
        ),
        ("llama3-8b --gpus 8 --ep 2", "num_experts is none"),
        ("llama3-8b --gpus 8 --gbs 7 --tp 1 --pp 1 --cp 1", "global_batch_size 7"),
        ("llama3-8b --cluster A100 --fp8-format hybrid", "has no units that multiply in fp8"),
        ("llama3-8b --cluster H100 --fp4-format e2m1", "has no units that multiply in fp4"),
        ("llama3-8b --cluster H100 --precision fp64", "has no units that multiply in fp64"),
        ("llama3-8b --gpus 10000001", "more than the 10,000,000"),
        ("llama3-8b --gpus 8 --gbs 99999999999", "at most 2,147,483,647"),
        (
            "mixtral-8x7b --gpus 8 --offload-modules core_attn",
            "fine_grained_activation_offloading is false",
        ),
    ],
)
def test_these_questions(line: str, says: str | None) -> None:
    error = told(line)
    assert (error is None) == (says is None), str(error)
    assert says is None or says in str(error)


def test_a_space_of_one_tensor_parallel_size_keeps_experts_whole_too() -> None:
    config = Config(PRESETS["mixtral-8x7b"]).with_values(
        global_batch_size=16, seq_length=512, tensor_model_parallel_size=4
    )
    space = enumerate_space(config, 8, frozenset({"tensor_model_parallel_size"}))
    assert set(space.columns["etp"].tolist()) == {1, 4}


def test_bounds_of_nothing_are_nothing() -> None:
    space = legal_space(asked("debug --gpus 4")).take(np.zeros(0, np.int64))
    cluster, ranks = preset("H100", 4), Ranks.of(space.config.model, space.partitions)
    assert memory_bound(space, ranks).shape == (0,)
    assert time_bound(space, ranks, cluster).seconds.shape == (0,)
    assert quick_time_bound(space, ranks, cluster).shape == (0,)


@pytest.mark.parametrize("word", ["banana", "--banana", "banana=3", "colour=red", "-x"])
def test_why_names_the_word_that_it_was_given(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "debug", "--gpus", "1", f"--why={word}"]) == 2
    text = capsys.readouterr().err
    assert f"--why {word}: {word.partition('=')[0]!r} is no layout setting" in text
    assert word.startswith("--") or f"--{word}" not in text


def test_a_page_that_cannot_be_written_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: pytest.TempPathFactory
) -> None:
    for path, says in (
        (str(tmp_path), "is a folder"),
        ("/proc/plan.html", "cannot"),
        ("/nowhere/at/all.html", "no folder"),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["plan", "debug", "--gpus", "1", "--html", path]) == 2
        assert says in capsys.readouterr().err
