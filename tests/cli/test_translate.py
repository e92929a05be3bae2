"""`fivefold translate`: a job of Megatron-LM becomes a recipe that says what it could not take."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from random import Random

import pytest

from fivefold.cli.main import main
from fivefold.config.sources import read_config
from fivefold.convert.megatron import MegatronFolder
from tests.config.test_megatron_job import DENSE, logged, read_job
from tests.convert.make_megatron import FOLDER, VOCABULARY
from tests.convert.test_megatron import MODELS, checkpoint


def translated(source: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    assert main(["translate", str(source), *more]) == 0
    done = capsys.readouterr()
    return done.out, done.err


def test_a_recipe_and_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job 1.log"
    job.write_text(DENSE + "--decrease-batch-size-if-needed --log-throughput --save /runs")
    out, err = translated(job, capsys)
    assert "# - decrease_batch_size_if_needed = True: --global-batch-size; a" in out
    assert (
        "decrease_batch_size_if_needed" in err
        and "log_throughput" in err
        and "log_throughput" not in out
    )
    for command in ("train 'job 1.toml' --nproc 16 --dry-run", "rehearse 'job 1.toml' --nproc 16"):
        assert f"  fivefold {command}\n" in err.partition("next\n")[2]
    recipe = tmp_path / "job.toml"
    recipe.write_text(out)
    assert read_config(recipe).model.num_layers == 4
    job.write_text(logged(dict(read_job(job.read_text()).given)))
    assert tomllib.loads(translated(job, capsys)[0]) == tomllib.loads(out)


def test_what_a_job_says_of_mixers_that_its_layers_lack_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM ignores it, and has dropout of attention wherever no job says otherwise."""
    states = "--hybrid-override-pattern MMMM --is-hybrid-model --mamba-num-groups 2 "
    more = "--qk-layernorm --window-size 8,0 --squared-relu --ffn-hidden-size 128"
    (tmp_path / "job.sh").write_text(f"{DENSE} {states} {more}")
    out, err = translated(tmp_path / "job.sh", capsys)
    assert "refused here" not in err, err
    idle = err.partition("without effect here\n")[2]
    for name in ("qk_layernorm", "window_size", "attention_dropout", "activation_func"):
        assert name in idle and f"\n{name} = " not in out


FITS = (
    *("--context-parallel-size 2", "--num-experts 8", "--exit-interval 40", "--fp8-format hybrid"),
    *("--iterations-to-skip 5 7", "--embedding-init-method-std 1.0", "--disable-bias-linear"),
    *(
        "--save-interval 30 --save-retain-interval 60",
        "--recompute-activations",
        "--mtp-num-layers 1",
    ),
)
BREAKS = (
    *("--hidden-size 60", "--micro-batch-size 3", "--num-layers 7", "--lr-decay-style WSD"),
    *("--save-interval 30 --save-retain-interval 45", "--iterations-to-skip 1000", "--min-lr 1"),
    *("--num-experts 8 --moe-router-topk 9", "--cuda-graph-impl local --hidden-dropout 0.1"),
    *("--optimizer dist_muon --optimizer-cpu-offload", "--rampup-batch-size 3 5 100"),
    "--sft",  # of what holds no conversations
)


@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_is_refused_here_is_told_so(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what the preview of its recipe says, and with the commands that come next."""
    draw = Random(seed)
    more = draw.sample(FITS, 2) + draw.sample(BREAKS, draw.choice((0, 1, 2)))
    (tmp_path / "job.sh").write_text(f"{DENSE} {' '.join(more)}")
    out, err = translated(tmp_path / "job.sh", capsys)
    (tmp_path / "job.toml").write_text(out)
    (ranks,) = re.findall(r"--nproc (\d+) --dry-run", err)
    status = main(["train", str(tmp_path / "job.toml"), "--nproc", ranks, "--dry-run"])
    mistakes = re.findall(r"^(?:error: )?(\S.*)$", capsys.readouterr().err, re.MULTILINE)
    told = err.partition("refused here as it stands\n")[2].partition("\nnext")[0].splitlines()
    assert (status != 0) == bool(told) == ("# Refused as it stands:" in out), (more, err)
    assert all(f"  {line}" in told for line in mistakes if status), (more, mistakes, told)


@pytest.mark.parametrize("name", ["llama", "mixed"])
def test_the_arguments_of_a_checkpoint(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a training besides: what `make_megatron` saves has a model's alone."""
    folder = checkpoint(FOLDER / name)
    whole = MegatronFolder(folder).arguments | {"seq_length": 16, "max_position_embeddings": 16}
    monkeypatch.setattr(MegatronFolder, "arguments", whole)
    out, _ = translated(folder, capsys, "--vocab-size", str(VOCABULARY))
    recipe = tmp_path / "job.toml"
    recipe.write_text(out)
    model, true = read_config(recipe).model, MODELS[name]
    for size in (
        "num_layers",
        "hidden_size",
        "num_experts",
        "ffn_size",
        "normalization",
        "num_kv_heads",
    ):
        assert getattr(model, size) == getattr(true, size)


@pytest.mark.parametrize("what", ["folder", "nothing"])
def test_what_is_no_job(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path if what == "folder" else tmp_path / "job.txt"
    assert main(["translate", str(source)]) == 2
    said = capsys.readouterr().err
    assert ("not a checkpoint of Megatron-LM" if what == "folder" else "cannot read") in said


def test_only_a_translation_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, recipe = tmp_path / "job.txt", tmp_path / "job.toml"
    job.write_text(DENSE)
    for _ in range(2):
        assert main(["translate", str(job), str(recipe)]) == 0
    recipe.write_text("[model]\n")
    assert main(["translate", str(job), str(recipe)]) == 2
    assert "exists, and was not written by fivefold translate" in capsys.readouterr().err
    assert main(["translate", str(job), str(tmp_path)]) == 2
    assert f"cannot use {tmp_path}: Is a directory" in capsys.readouterr().err
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["translate", str(job), str(pipe)]) == 0
    assert os.read(reader, 1 << 16).startswith(b"# A job of Megatron-LM")
    os.close(reader)
    assert recipe.read_text() == "[model]\n"


def test_the_next_line_works_whatever_ranks_a_job_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template says 1, or nothing: then it is the fewest ranks that its degrees need."""
    random, job = Random(0), tmp_path / "job.txt"
    unsaid = DENSE.replace("torchrun --nproc_per_node=8 --nnodes 2", "python")
    experts = "--num-experts 4 --moe-ffn-hidden-size 32 --sequence-parallel "
    for _ in range(12):
        tp, pp, ep, etp = (random.choice((1, 2, 4)) for _ in range(4))
        ranks = random.choice((None, 1, 3, 8))
        with_ranks = DENSE.replace("node=8 --nnodes 2", f"node={ranks}")
        job.write_text(
            (unsaid if ranks is None else with_ranks)
            + f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
            + (f"{experts} --expert-model-parallel-size {ep} " if ep > 1 else "")
            + (f"--expert-tensor-parallel-size {etp} " if ep > 1 else "")
        )
        out, err = translated(job, capsys, str(tmp_path / "job.toml"))
        (line,) = re.findall(r"^  fivefold (train .*--dry-run)$", out + err, re.MULTILINE)
        assert main(shlex.split(line)) == 0, capsys.readouterr().err
        capsys.readouterr()


def test_what_idles_there_is_left_out_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the end of a decay that a constant rate does not have: a run would refuse it."""
    job, recipe = tmp_path / "job.txt", tmp_path / "job.toml"
    job.write_text(DENSE + "--lr-decay-style constant --min-lr 1e-5 --lr-decay-iters 8")
    out, _ = translated(job, capsys, str(recipe))
    assert "lr_decay_iters, min_lr" in out and "min_lr" not in recipe.read_text()
    assert main(["train", str(recipe), "--nproc", "16", "--dry-run"]) == 0


TITAN = """[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 4
seq_len = 256
steps = 10
[parallelism]
tensor_parallel_degree = 2
"""


def test_a_job_of_torchtitan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed works when typed: its name is not that of the job itself."""
    job, recipe = tmp_path / "a.toml", tmp_path / "a-recipe.toml"
    job.write_text(TITAN)
    assert main(["translate", str(job)]) == 2
    assert "--nproc N" in capsys.readouterr().err
    out, err = translated(job, capsys, "--nproc", "4")
    assert "fivefold train a-recipe.toml --nproc 4 --dry-run" in err
    recipe.write_text(out)
    assert main(["train", str(recipe), "--nproc", "4", "--dry-run"]) == 0
    capsys.readouterr()
    changed, _ = translated(job, capsys, "--nproc", "4", "--script-arguments=--training.steps 7")
    assert tomllib.loads(changed)["training"]["train_iters"] == 7
    own, _ = translated(job, capsys, "--nproc", "4", "--model", "debug-llama")
    assert tomllib.loads(own)["model"] != tomllib.loads(out)["model"]
    assert main(["translate", str(job), "--vocab-size", "7"]) == 2
    assert "--vocab-size has no effect on a job of" in capsys.readouterr().err
