"""What a script would run, against bash itself, and what happens where nobody knows a value."""

import re
import subprocess
from pathlib import Path
from random import Random

import pytest

from fivefold.errors import ConfigError
from fivefold.shell.script import ShellScript
from fivefold.shell.unknown import dollar, readable

BEGINS = """
launch() { printf '<%s>' "$@"; printf '\\n'; }
"""
SETS = "V='a b.c'\nW=7\nEMPTY=\nA=(one 'two three' 4)\nB=()\ndeclare -A M\nM[k]=v\n"
EXPANSIONS = (
    *("$V", "${V}", "$W", "$EMPTY", "${EMPTY:-d e}", "${EMPTY-f}", "${V:+yes no}", "${W:=8}"),
    *("${V#a}", "${V##*b}", "${V%.*}", "${V%%b*}", "${V/b/$W}", "${V//[ab]/x}", "${#V}", "${V:2}"),
    *("${V:0:3}", "${V^^}", "${V,,}", "${A[@]}", "${A[*]}", "${A[0]}", "${#A[@]}", "${A[@]:1}"),
    *(
        "${B[@]}",
        "${A[W - W]}",
        "${A[-1]}",
        "${M[k]}",
        "${!A[@]}",
        "$((W * 2 + 1))",
        "$(( (W - 1) / 4 % 3 ))",
    ),
    *("$((W > 3 ? W << 1 : 0))", "$((-7 / 2))", "$(echo $V x)", "`echo $W`", "$(dirname /a/b/c)"),
    *("$(basename /a/b.sh)", "$(expr 6 \\* 7)", "$#", "$1", "$@", "$((2 ** 3 ** 0 - 1))"),
)
_ENTRIES = re.compile(r"\$\{!?A\[[@*]\]")
TOLD = (
    *(
        "$(cd /usr/bin && pwd)",
        '$(cd "$(dirname /usr/bin/c)" >/dev/null 2>&1 && pwd)/d',
        "$(cd /usr; cd ../etc; pwd)",
    ),
    *(
        "$(realpath /usr/../etc)",
        "$(echo $V | tr ' .' 'x,')",
        "$(echo $V | wc -w)",
    ),
    *(
        "$(echo $(seq 1 3))",
        "$(if [ $W -gt 5 ]; then echo big; else echo small; fi)",
        "$(V=3; echo $V)",
    ),
    *(
        "$(basename /a/b.sh .sh)",
        "$(echo log >&2; echo 3)",
        "$(false || echo other)",
        "$(echo $(seq 6 -2 1))",
    ),
    *(
        "$(echo -n a; echo b)",
        "$(echo $(for I in 1 2; do echo $((I * W)); done))",
        "$(readlink -f /usr/./share)",
    ),
)
PLAIN = ("x", "-l", "a{1,2}b", "{3..1}", "\\$V", "--k=v", "'s q'", "\"d 'q'\"", "a#b", "~x")
CONDITIONS = (
    *("[ $W -gt 3 ]", "[ -z $EMPTY ]", '[ "$V" = "a b.c" ]', "[ $W != 7 ]", "[[ $V == a* ]]"),
    *("[[ -n $V && $W -lt 9 ]]", "((W % 2))", "! [ -z $W ]", "[[ ! ( $W == 7 ) || $V == x ]]"),
    *("[[ $V =~ b\\.c$ ]]", '[ $W -eq 7 -a -z "$EMPTY" ]', "false", "true && [ 1 -ne 2 ]"),
)


def word(draw: Random) -> str:
    kinds = (
        lambda: draw.choice(PLAIN),
        lambda: draw.choice(EXPANSIONS),
        lambda: f'"{draw.choice(EXPANSIONS)} {draw.choice(EXPANSIONS)}"',
        lambda: f"p{draw.choice(EXPANSIONS)}",
        lambda: draw.choice(TOLD),
    )
    return draw.choice(kinds)()


def statement(draw: Random, depth: int) -> str:
    words = " ".join(word(draw) for _ in range(draw.randint(1, 3)))
    simple = (
        f"launch {words} # {words}\n",
        f"V={word(draw)}",
        f"V+={word(draw)}",
        f"A=({words} # of it\n  x)",
        f'IFS=", " read -ra A <<< "y {draw.choice(EXPANSIONS)}"',
        f'read -r V Y <<< "$W {draw.choice(EXPANSIONS)} 3"; launch "$V" "$Y"',
        f"read -r -d '' V <<END\n --a {draw.choice(EXPANSIONS)}\nEND\nlaunch $V",
        f"launch $(cat <<END\n--a {draw.choice(EXPANSIONS)}\n--b\nEND\n)",
        f'printf -v V "[%s]" "{draw.choice(EXPANSIONS)}"',
        f"A+=({_ENTRIES.sub('${V', words)})",  # with its own it doubles in every turn of a loop
        f"export EMPTY={draw.choice(EXPANSIONS)}; launch $EMPTY",
        f"A[{draw.randint(0, 4)}]={word(draw)}",
        f"((W += {draw.randint(1, 5)})) && launch $W \\\n  {words}",
        f"(cd /etc; V={word(draw)}; launch $V)",
        f'C="launch {draw.choice(PLAIN[:3])} $W"; $C; eval $C',
    )
    if depth == 0 or draw.random() < 0.6:
        return draw.choice(simple)
    inner = [script(draw, depth - 1) for _ in range(3)]
    test = draw.choice(CONDITIONS)
    leave = draw.choice(("break", "continue", "launch on"))
    further = draw.choice((leave, "break 2", "continue 2"))
    compound = (
        f"if {test}; then\n{inner[0]}\nelif {draw.choice(CONDITIONS)}\nthen\n{inner[1]}\n"
        f"else\n{inner[2]}\nfi",
        f"{test} && {{ {inner[0]}\n}} || launch else",
        f"case {word(draw)} in\n  a*|7) {inner[0]};;\n  *) {inner[1]} ;;\nesac",
        f"for V in {words}; do\n{inner[0]}\ndone",
        f"for V in {words}; do\n{inner[0]}\n{test} && {leave}\n{inner[1]}\ndone",
        f"for X in 1 2; do\nfor V in {words}; do\n{test} && {further}\nlaunch $V\ndone\n"
        f"launch $X\n{draw.choice(CONDITIONS)} && {leave}\nlaunch $X again\ndone",
        f"for ((W = 0; W < 3; W++)); do\n{inner[0]}\n((W > 4)) && W=9\ndone",
        f"f() {{\n{inner[0]}\nlaunch $# $1\n}}\nf {words} last",
        f"cat > /dev/null << END\nlaunch {words}\nEND\n{inner[0]}",
    )
    return draw.choice(compound)


def script(draw: Random, depth: int = 2) -> str:
    return "\n".join(statement(draw, depth) for _ in range(draw.randint(1, 3)))


def read(text: str, *arguments: str, **environment: str) -> ShellScript:
    found = ShellScript(environment, arguments, None, lambda words: words[0] == "launch")
    found.run(text)
    return found


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 9))]
)
def test_commands_are_those_of_bash(part: int) -> None:
    cases = [script(Random(f"{part} {number}")) for number in range(400)]
    text = "\n".join(f"(\nset -f\n{SETS}{each}\nprintf '\\nEND\\n')" for each in cases)
    ran = subprocess.run(
        ["bash", "-s", "r s", "t"],
        input=BEGINS + text,
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": "/h", "PATH": "/usr/bin:/bin"},
    )
    for case, there in zip(cases, ran.stdout.split("END\n")[:-1], strict=True):
        here = read(SETS + case, "r s", "t", HOME="/h").commands
        told = ["".join(f"<{each}>" for each in words[1:] or [""]) for words in here]
        want = there.strip("\n").split("\n") if there.strip("\n") else []
        launched = [line for line, words in zip(told, here, strict=True) if words[0] == "launch"]
        assert launched == want, case


def test_what_is_not_set_is_named_wherever_it_goes() -> None:
    text = """
    N=$(nvidia-smi | wc -l); M=$((N * $2)); P=${OUT}/logs
    ARGS="--a $M --b $P --c ${TP:-4} ${MORE}"
    launch $ARGS "$@"
    """
    words = read(text).commands[-1]
    assert [readable(each) for each in words] == [
        *("launch", "--a", "$(nvidia-smi | wc -l)$2", "--b", "$OUT/logs", "--c", "4", "$MORE"),
    ]
    again = read(text, "1", "8", OUT="o", TP="2").commands[-1]
    assert [readable(each) for each in again][3:] == [
        "--b",
        "o/logs",
        "--c",
        "2",
        "$MORE",
        "1",
        "8",
    ]


def test_what_decides_and_is_not_known_is_noted() -> None:
    quiet = "if [ -f x ]; then mkdir y; fi; [ -z $Q ] && R=1\n"
    loud = "if [ $SIZE = 7B ]; then L=32; else L=1; fi\nif [ -d x ]; then L=2; fi\nsource env.sh\n"
    assert not read(quiet).notes
    notes = [dollar(each) for each in read(loud + "launch $L").notes]
    assert notes == ["$SIZE", "$([ -d x ])", "$(source env.sh)"]


def test_a_script_that_is_sourced_is_read(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("L=12\n")
    found = ShellScript({}, (), tmp_path / "job.sh", lambda words: words[0] == "launch")
    found.run('. ./env.sh\nif [ ! -f x ]; then exit 1; fi\nsrun -N 2 bash -c "launch $L \\$RANK"')
    assert [readable(each) for each in found.commands[-1]][-2:] == ["12", "$RANK"]


@pytest.mark.parametrize(
    "waits",
    [
        "while true; do S=$(squeue -j 1); sleep 3; done",
        "until curl -s localhost:80; do sleep 1; done",
        'while true; do case "$(sacct)" in DONE) exit 0;; *) sleep 9;; esac; done',
        "N=0\nwhile ! ready; do N=$((N + 1)); if [ $N -gt 5 ]; then break; fi; done",
    ],
)
def test_what_waits_for_others_is_waited_for_once(waits: str) -> None:
    """Where a turn of a loop changes nothing, no later one of a script that is only read does."""
    assert [*filter(lambda words: words[0] == "launch", read(f"{waits}\nlaunch a").commands)] == [
        ["launch", "a"]
    ]


def test_a_script_knows_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "env.sh").write_text(
        'HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd)\n'
        "NAME=$(basename $0 .sh)\n"
    )
    text = """
    cd "$(dirname "$(readlink -f "$0")")"
    ROOT="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"
    . parts/env.sh
    (cd /usr; launch $PWD)
    launch $HERE $NAME $ROOT $(pwd) $BASH_SOURCE $(hostname) $(echo $(date)/x | tr / -)
    """
    path = tmp_path / "job.sh"
    path.write_text(text)
    found = ShellScript({"PWD": "/"}, (), path, lambda words: words[0] == "launch")
    found.run(text)
    ran = subprocess.run(
        ["bash", "-c", f"{BEGINS}\n. {path}", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    there = [line[1:-1].split("><") for line in ran.stdout.splitlines()]
    here = [[readable(word) for word in words[1:]] for words in found.commands]
    assert here[0] == there[0] == ["/usr"]
    assert here[1][:5] == there[1][:5]
    assert here[1][5:] == ["$(hostname)", "$(echo $(date)/x | tr / -)"]


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("$(< hosts)", "$(< hosts)"),
        ("$(cat << E > file\na\nE\n)", "$(cat << E > file\na\nE)"),
        ("$(case x)", "$(case x)"),
        ("$(cd $ELSEWHERE; pwd)/a", "$ELSEWHERE/a"),
        ("$(cat << E | tr b c\nab\nE\n)", "ac"),
    ],
)
def test_output_that_nobody_knows_is_not_taken_for_empty(word: str, there: str) -> None:
    (command,) = read(f"launch {word}", PWD="/here").commands
    assert readable(command[1]) == there


def test_a_job_in_a_document_is_found() -> None:
    found = read("N=3\nsbatch <<EOF\n#SBATCH -N 2\nlaunch $N \\$M\nEOF\n").commands
    assert [[readable(each) for each in words] for words in found] == [["launch", "3", "$M"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if true; then launch", "does not expect"),
        ("launch 'a", "' of line 1 has no end"),
        ("A=$((1 / 0))", "divides by 0"),
        ("A=$((1 +))", "no sum of whole numbers"),
        ("while true; do A+=1; done", "more than"),
        ("f() { f; }\nf", "calls itself"),
        ("fi", "does not expect 'fi'"),
        ("launch )", "does not expect"),
    ],
)
def test_what_bash_would_not_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)
