"""Help, previews and the shape of answers, in a fresh interpreter where torch must stay out."""

import io
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from fivefold.cli import doctor
from fivefold.cli import main as cli
from fivefold.cli.main import MEANT_VERBS, VERBS, main
from fivefold.cli.style import paint
from fivefold.config.config import SECTION_SETTINGS, SECTIONS, SETTINGS
from fivefold.config.flags import ALIASES, SWITCHES
from fivefold.config.foreign import foreign_settings
from fivefold.config.reference import help_text
from fivefold.config.settings import settings_of
from fivefold.config.sources import RECIPES, read_config, recipe_names, to_toml
from fivefold.train.ranks.launch import End
from tests import programs

ROOT = Path(__file__).parents[2]
TORCH_FREE = """
import sys
from fivefold.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was loaded"
sys.exit(status)
"""
EACH = """
import sys
from fivefold.cli.main import main
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
    print(end="\\f")
assert "torch" not in sys.modules, "torch was loaded"
"""


def run(*argv: str, program: str = TORCH_FREE, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | env,
    )


def printed_by(*lines: str) -> list[str]:
    """What each of these command lines prints, one after the other in one process."""
    done = run(*lines, program=EACH)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    *printed, rest = done.stdout.split("\f")
    assert len(printed) == len(lines) and not rest
    return printed


def test_help_loads_no_torch_and_fits_the_line() -> None:
    verbs = ("train", "verify", "data", "sample", "doctor")
    printed = printed_by(*(f"{verb} --help" for verb in verbs), *(f"help {verb}" for verb in verbs))
    assert printed[len(verbs) :] == printed[: len(verbs)]
    for verb, said in zip(verbs, printed, strict=False):
        assert said.startswith(f"usage: fivefold {verb}")
        assert max(map(len, said.splitlines())) <= 100
        settings = verb in ("train", "verify", "data")
        assert ("Settings that most runs name" in said) == settings
        assert len(said.splitlines()) <= 110


def test_help_of_all_lists_every_setting() -> None:
    out = run("train", "--help", "all").stdout
    assert "  --model WORD, --preset\n" in out
    for section, settings in SECTION_SETTINGS.items():
        assert f"[{section}]" in out
        for setting in settings:
            off = f"--no-{setting.flag[2:]}"
            assert (off if setting.default is True else setting.flag) in out


@pytest.mark.parametrize(
    ("topic", "first"),
    [
        ("memory", "[memory] "),
        ("experts", "[experts] "),
        ("--tp", "  --tensor-model-parallel-size N, --tp"),
        ("zero_stage", "  --data-parallel-sharding-strategy WORD"),
        ("nproc", "  --nproc N"),
        ("--no-qk-layernorm", "  --qk-layernorm"),
        ("pipeline_model_parallel_size", "  --pipeline-model-parallel-size N, --pp"),
        ("--pp", "  --pipeline-model-parallel-size N, --pp"),
        ("pp_size", "  --pipeline-model-parallel-size N, --pp"),
        ("--moe-permute-fusion", "  --moe-permute-fusion "),
    ],
)
def test_help_of_a_section_or_a_flag(
    topic: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--help", topic]) == 0
    out = capsys.readouterr().out
    assert out.startswith(first) and "usage" not in out
    assert main(["help", "train", topic]) == 0
    assert capsys.readouterr().out == out


def test_help_knows_every_name_of_a_setting_without_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {setting.name for settings in SECTION_SETTINGS.values() for setting in settings}
    for name in (*names, *(alias for alias, of in ALIASES.items() if of in names), *SWITCHES):
        flag = f"--{name.replace('_', '-')}"
        for topic in {name, flag, flag[2:]} - set(VERBS):
            assert main(["help", topic]) == 0, topic
            meant = ALIASES.get(name, name)
            own = (meant if meant in names else meant.removeprefix("no_")).replace("_", "-")
            first = capsys.readouterr().out.splitlines()[0]
            assert re.match(rf"  --(no-)?{own}[ ,]", f"{first} ") or topic in SECTIONS, first
    assert main(["help", ""]) == 2
    assert main(["help", "trian"]) == 2
    assert "unknown command 'trian', did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("fit", "train"), ("generate", "sample"), ("Merge_Weights", "convert"), ("run", "train")],
)
def test_a_command_of_another_trainer_is_answered_by_ours(
    theirs: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([theirs, "debug"], ["help", theirs]):
        assert main(words) == 2
        said = f"unknown command {theirs!r}, did you mean {ours!r}?"
        assert capsys.readouterr().err.startswith(f"error: {said}\n")


def test_every_command_that_is_meant_is_one() -> None:
    assert not {*MEANT_VERBS} & {*VERBS}
    assert {*MEANT_VERBS.values()} <= {*VERBS, "help", "--version"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_knows_the_flags_of_every_command(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for setting in settings_of(import_module(f"fivefold.cli.{verb}").Options):
        if not setting.positional and setting.name not in VERBS:
            assert main(["help", setting.flag[2:]]) == 0, setting.flag
            said = capsys.readouterr().out
            # A section is called so, or as others call one of train's.
            assert setting.flag in said or setting.name in (*SECTIONS, *foreign_settings())


@pytest.mark.parametrize("topic", [*SECTIONS, *SETTINGS])
def test_help_of_a_misspelt_topic_says_what_is_meant(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a command is named, as beside every other setting, or not."""
    misspelt = f"{topic[:-1]}x{topic[-1]}"
    ways = {"train --help": topic not in [*SETTINGS][::2], "help": topic not in [*SETTINGS][1::2]}
    for words in (way for way, asked in ways.items() if asked):
        assert main([*words.split(), misspelt]) == 2
        assert "did you mean" in capsys.readouterr().err, words


def test_help_of_a_setting_of_others_says_what_differs_here() -> None:
    """Or why none is needed: what an unknown flag is told."""
    options = import_module("fivefold.cli.train").Options
    known = {*SETTINGS, *SWITCHES, *ALIASES, *(setting.name for setting in settings_of(options))}
    noted = {
        name: each.note
        for name, each in foreign_settings().items()
        if each.note and name not in known and (not each.flags or each.meant(known))
    }
    assert len(noted) > 200
    for name, note in noted.items():
        for topic in (name, f"--{name.replace('_', '-')}"):
            said = help_text("train", options, io.StringIO(), topic)
            assert note in " ".join(said.split()), topic


def test_help_of_no_topic_says_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "memroy"]) == 2
    assert "did you mean 'memory'?" in capsys.readouterr().err
    assert main(["doctor", "--help", "lr"]) == 2  # which takes no settings of a run
    assert "fivefold doctor --help" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["muon", "ZeRO-1", "nvme", "mamba", "expert"])
def test_help_of_a_word_shows_the_settings_that_are_about_it(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["train", "--help", word], ["help", word]):
        assert main(words) == 0
        first, *entries = capsys.readouterr().out.splitlines()
        assert first.endswith(f" with {word!r}")
        assert int(first.split()[0]) == sum(line.startswith("  --") for line in entries) > 0
        assert word.lower() in "\n".join(entries).lower()


@pytest.mark.parametrize("width", [60, 75, 100])
@pytest.mark.parametrize("words", ["help", "help train", "help plan", "train debug --dry-run"])
def test_help_fits_the_terminal(
    words: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((width, 9)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words.split()) == 0
    text = re.sub("\x1b\\[\\d+m", "", capsys.readouterr().out)
    lines = text.partition("what follows\n")[2] or text  # settings are TOML
    assert max(map(len, lines.splitlines())) <= width


def test_help_is_among_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hlep"]) == 2
    assert "did you mean 'help'?" in capsys.readouterr().err


def test_overview_lists_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {verb}  " in done.stdout or f"  {verb} " in done.stdout for verb in VERBS)
    assert run().stdout == done.stdout


def world_of(recipe: str) -> int:
    """A recipe says on its first line for how many ranks it is."""
    first = (RECIPES / f"{recipe}.toml").read_text().split("\n")[0]
    match = re.match(r"# (\d+) ranks?: ", first)
    assert match, first
    return int(match[1])


def test_recipes_preview_without_torch() -> None:
    worlds = {recipe: world_of(recipe) for recipe in recipe_names()}
    lines = (f"train {recipe} --nproc {world} --dry-run" for recipe, world in worlds.items())
    for (recipe, world), said in zip(worlds.items(), printed_by(*lines), strict=True):
        assert re.search(rf"^world +{world} ", said, re.MULTILINE), recipe
        assert max(map(len, said.splitlines())) <= 160, recipe


def test_the_published_layout_of_llama3_405b() -> None:
    out = run("train", "llama3-405b", "--nproc", "16384", "--dry-run").stdout
    assert "pp 16 x dp 128 x cp 1 x tp 8" in out
    assert "126 layers in 16 stages: 7+8" in out
    assert re.search(r"^parameters +406 B", out, re.MULTILINE)
    assert "16,777,216" in out


def test_preview_shows_everything_that_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "debug", "--nproc", "4", "--tp", "2", "--pp", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tensor_model_parallel_size = 2" in out
    assert "data_parallel_shard_size = 1" in out  # inferred
    assert "pp                2  stride 2      ranks 0, 2" in out
    assert "rank 1  2-3 L" in out
    assert "rank 0 F0-" in out
    assert "bubble 7.7%" in out
    assert "microbatches" in out
    assert "\033" not in out


def test_preview_takes_the_launcher_s_world(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "debug", "--dry-run"]) == 0
    assert "pp 1 x dp 2 x cp 1 x tp 1" in capsys.readouterr().out
    assert main(["train", "debug", "--tp", "3"]) == 2
    assert not capsys.readouterr().err  # rank 0 says it for all


def test_settings_of_a_preview_are_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config("demo")
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert main(["train", str(path), "--nproc", "4", "--dry-run"]) == 0
    first = capsys.readouterr().out
    assert main(["train", "demo", "--nproc", "4", "--dry-run"]) == 0
    assert capsys.readouterr().out == first


class Terminal:
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("error:", "red", Terminal()) == "\033[31merror:\033[0m"
    assert paint("error:", "red", sys.__stderr__) == "error:" or sys.__stderr__.isatty()
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("error:", "red", Terminal()) == "error:"


def test_interrupt_leaves_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert main(["train"]) == 130
    assert not capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"'{sys.executable}' -m fivefold train --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage:")
    assert not done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_no_traceback(encoding: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    words = ["launch", "slurm", "debug", "--output", "jöb→.sbatch"]
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words], env=env, cwd=tmp_path, capture_output=True
    )
    shown = "jöb→.sbatch".encode(encoding, "backslashreplace")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(shown + b" is written") or b"'" + shown in done.stdout


def test_data_counts_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("A short line about nothing.\n" * 400)
    argv = f"data debug --data-path {tmp_path}/a.txt --data-cache-path {tmp_path}/cache --split 1"
    assert main([*argv.split(), "--vocab-size", "300"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^a.txt +[\d.]+ K tokens +in 1 document$", out, re.MULTILINE)
    assert re.search(r"^train +\d+ samples +of 64 tokens: ", out, re.MULTILINE)
    assert re.search(r"^valid +none", out, re.MULTILINE)


@pytest.mark.slow
def test_doctor_examines_this_machine() -> None:
    done = programs.run(["doctor"], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = ("two processes started", "fp32 matmul", "AdamW")
    for word in ("Python", "torch", "cores", *measured, "flash_cpu"):
        assert word in done.stdout
    # On any machine little for a layer of 8B.
    said = " ".join(done.stdout.split())
    (share,) = re.findall(r"\(llama3-8b, .* one rank\): (?:less than )?([\d.]+)%", said)
    assert 0 < float(share) < 1000
    assert "ready to train" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("writable", [True, False])
def test_doctor_notes_a_folder_that_cannot_be_written(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: writable)  # root may write anywhere
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    for folder in (tmp_path, tmp_path / "not" / "yet"):
        line = doctor.disk("disk here", folder, "--save")
        assert line.verdict == ("ok" if writable else "note")
        assert f"{tmp_path}" in line.text.split()
    assert ("1.00 TiB free" in line.text) == writable
    assert ("cannot be written: --save names another folder" in line.text) != writable


def test_doctor_notes_a_home_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        line = doctor.disk("disk of cache", home / ".cache", "--data-cache-path")
        assert (line.verdict, line.text.split()[1:4]) == ("note", ["cannot", "be", "written:"])


@pytest.mark.parametrize(
    "words",
    [
        "launch slurm debug --output PLACE",
        "tune debug --out PLACE",
        "report RUN --html PLACE",
        "plan --calibrate PLACE",
        "schedule 1f1b --svg PLACE",
    ],
)
def test_a_place_that_cannot_be_written_is_one_message(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = to_toml(read_config("debug"))
    (tmp_path / "config.toml").write_text(settings)
    (tmp_path / "metrics.jsonl").write_text("")
    place = "/dev/null/x" if "calibrate" not in words else f"{tmp_path}"
    given = {"RUN": f"{tmp_path}", "PLACE": place}
    assert main([given.get(word, word) for word in words.split()]) == 2
    assert f"cannot write {place}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "said"), [("0", "unknown recipe"), ("1", ""), ("x", "unknown recipe")]
)
def test_a_mistake_is_told_once_a_host_and_by_a_rank_that_cannot_be(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "no-such-recipe"]) == 2
    told = capsys.readouterr().err
    assert said in told if said else not told


@pytest.mark.parametrize(
    "words",
    [
        *("--load nowhere", "--save /dev/null/x", "--data-path nowhere", "--tokenizer-model x"),
        *("--lrr 0.01", "--tp 3"),
    ],
)
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_what_a_host_lacks_or_was_told_is_told_by_its_first_rank(
    words: str, local_rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank of all may be on a host that has the files, and was given other flags."""
    place = {"RANK": f"{2 + int(local_rank)}", "WORLD_SIZE": "4", "LOCAL_RANK": local_rank}
    place |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for variable, value in place.items():
        monkeypatch.setenv(variable, value)
    assert main(["train", "debug", *words.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") if local_rank == "0" else not told


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_a_mistake_of_one_rank_is_told_by_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank, which prints what is wrong for all, knows nothing of it."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for variable, value in (place | {"MASTER_PORT": "29999"} | {name: "x"}).items():
        monkeypatch.setenv(variable, value)
    assert main(["train", "debug"]) == 2
    assert f"{name} must be a whole number, and is 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train debug --save a\udcff", "train a\udcff", "audit a\udcff"])
def test_a_word_that_is_not_utf_8_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split()]) == 2
    assert "must be text in UTF-8, not" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_word_is_no_value(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a shell's variable that is not set; as a path it would be the current folder."""
    own = [*settings_of(import_module(f"fivefold.cli.{verb}").Options)]
    texts = [s for s in (*own, *[*SETTINGS.values()] * (verb == "train")) if s.kind is str]
    for setting in texts:
        if setting.choices or (verb, setting.name) == ("sample", "prompt"):
            continue
        before = [s for s in own if s.positional]
        place = before.index(setting) if setting.positional else 0
        words = [*["x"] * place, ""] if setting.positional else [setting.flag, ""]
        assert main([verb, *words]) == 2
        name = setting.name.upper() if setting.positional else setting.flag
        assert f"{name} is empty\n" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_current_folder_that_is_gone_is_said(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch, which looks there, would end the process with words about its own library."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main([verb]) == 2
    assert capsys.readouterr().err.startswith("error: the current folder is gone")
    assert main(["help", verb]) == 0


def test_plan_from_no_run_names_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--score runs.csv --gpus 8 --top 3",
            "--score runs instead of planning, and ignores --gpus, --top",
        ),
        ("--score runs.csv --tp 2", "ignores --tensor-model-parallel-size"),
        ("--model gpt2 --score runs.csv", "ignores --model"),
        ("llama3-8b --calibrate a.toml --json", "ignores the recipe, --json"),
        ("llama3-8b --nproc 4", "works: --gpus 4"),
    ],
)
def test_what_a_plan_would_not_read_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_failure_that_ranks_have_told_is_not_told_again_and_has_their_status(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(_: list[str]) -> int:
        End(status).raise_if_failed("the evaluation failed")
        return 0

    monkeypatch.setattr(cli, "_dispatch", failed)
    assert main(["eval", "run"]) == status
    assert capsys.readouterr().err == ""
