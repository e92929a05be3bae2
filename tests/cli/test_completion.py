import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.cli.completion import SCRIPTS, continuations
from fivefold.cli.main import VERBS, main
from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.sources import recipe_names


def test_commands_flags_values_and_recipes() -> None:
    assert {*VERBS} < {*continuations("fivefold ")}
    assert continuations("fivefold tra") == ["train", "translate"]
    assert {*recipe_names()} <= {*continuations("fivefold train ")}
    assert continuations("fivefold train demo --pipeline-schedule zb") == ["zb_h1", "zb_h2", "zb_v"]
    assert "--plant" in continuations("fivefold verify --pl")
    assert continuations("fivefold launch sky") == ["skypilot"]
    assert continuations("fivefold train --save ") == []  # the shell's own: names of files
    assert continuations("fivefold nonsuch --") == []


def test_every_setting_can_be_completed() -> None:
    found = {*continuations("fivefold train --")}
    for settings in SECTION_SETTINGS.values():
        for setting in settings:
            off = f"--no-{setting.flag[2:]}"
            assert (off if setting.default is True else setting.flag) in found


@given(
    st.lists(st.sampled_from(["fivefold", *VERBS, "--tp", "--", "-", "x", "--plant", "help", " "]))
)
def test_what_is_offered_goes_on_with_what_was_typed(words: list[str]) -> None:
    line = " ".join(words)
    begun = "" if not line or line[-1].isspace() else line.split()[-1]
    assert all(word.startswith(begun) for word in continuations(line))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_asks_and_gets_the_answer(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "fivefold").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m fivefold \"$@\"\n")
    (tmp_path / "fivefold").chmod(0o755)
    ask = {
        "bash": "COMP_LINE='fivefold verify --rac'; COMP_POINT=21; _fivefold; echo $COMPREPLY",
        "zsh": "COMP_LINE='fivefold verify --rac'; COMP_POINT=21; _fivefold; echo $COMPREPLY",
        "fish": "complete -C 'fivefold verify --rac'",
    }
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", f"{SCRIPTS[shell]}\n{ask[shell]}"],
        env=variables,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[:1] == ["--races"], done.stderr


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "bash | zsh | fish" in capsys.readouterr().err
