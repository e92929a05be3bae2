import contextlib
import random
import subprocess
import sys

import pytest

from fivefold.errors import ConfigError, PlaceError
from fivefold.train.ranks.rank_env import MPI_SIZES, RankEnv, first_host, read_rank_env

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)",
    "SLURM_NODELIST": "gpu[007-009,020]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}


def test_alone_without_variables():
    assert read_rank_env({"PATH": "/bin"}) == RankEnv(launcher="single")


def test_torchrun_is_read_and_written_alike():
    env = read_rank_env(TORCHRUN)
    assert env == RankEnv(5, 1, 8, 4, "node1", 29500, "torchrun")
    assert env.variables == TORCHRUN


def test_torchrun_wins_inside_a_slurm_job():
    assert read_rank_env(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm():
    env = read_rank_env(SLURM)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (9, 1, 12, 2)
    assert (env.master_addr, env.launcher) == ("gpu007", "slurm")


def test_slurm_falls_back_on_what_was_asked_for():
    plain = {k: v for k, v in SLURM.items() if k not in ("SLURM_STEP_TASKS_PER_NODE",)}
    assert read_rank_env(plain | {"SLURM_NTASKS_PER_NODE": "4"}).local_world_size == 4


def test_slurm_ports_agree_between_ranks_and_differ_between_steps_and_jobs():
    port = read_rank_env(SLURM).master_port
    assert read_rank_env(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port == port
    assert read_rank_env(SLURM | {"SLURM_STEP_ID": "1"}).master_port != port
    assert read_rank_env(SLURM | {"SLURM_JOB_ID": "123457"}).master_port != port
    assert 1024 < port < 32768


def test_slurm_with_one_task_is_alone():
    assert read_rank_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).launcher == "single"


def test_a_batch_script_that_forgot_srun():
    script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}
    with pytest.raises(ConfigError, match=r"12 tasks.*\n.*srun"):
        read_rank_env(script)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "8"}, "rank 8 does not exist among 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 does not exist among 4"),
        ({"RANK": "-1"}, "rank -1"),
        ({"LOCAL_WORLD_SIZE": "16"}, "16 ranks on this machine, but only 8"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a whole number, and is 'many'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT must be a whole number"),
        ({"LOCAL_RANK": None}, "RANK.* set, but not LOCAL_RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR and MASTER_PORT"),
        ({"RANK": None, "LOCAL_RANK": None}, "WORLD_SIZE is 8 but RANK is not set"),
        ({"WORLD_SIZE": "0"}, "^ranks are numbered among 0\n  there must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "-2"}, "^local ranks are numbered among -2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be 1 .. 65535, not 70000"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
    ],
)
def test_what_cannot_be_is_a_config_error(change, says):
    variables = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError, match=says):
        read_rank_env(variables)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("b,a", "b"),
        ("n[3,5-7]", "n3"),
        ("n[001-128].cluster.org,m1", "n001.cluster.org"),
        ("r[1-2]n[04-08]", "r1n04"),
    ],
)
def test_first_host(nodelist, first):
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    "nodelist",
    [
        50 * "gpu-" + "[1-",
        "n[1-",
        "n[",
        "n[]",
        "n[a-b]",
        "n[1-2",
        "[",
        ",n1",
        "4(x2)",
        "n[1-2-3]",
        "n[1,]",
    ],
)
def test_a_broken_node_list_is_named(nodelist):
    assert first_host(nodelist) == ""
    with pytest.raises(ConfigError, match="SLURM_NODELIST is no list of nodes") as refused:
        read_rank_env(SLURM | {"SLURM_NODELIST": nodelist})
    assert "MASTER_ADDR=HOST" in str(refused.value)
    assert read_rank_env(SLURM | {"SLURM_NODELIST": nodelist, "MASTER_ADDR": "a"})


@pytest.mark.parametrize("name", MPI_SIZES)
def test_processes_of_mpirun_are_not_taken_for_single_ones(name):
    one_task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    for around in ({}, one_task):
        assert read_rank_env(around | {name: "1"}).launcher == "single"
        with pytest.raises(ConfigError, match="mpirun has started 4 processes"):
            read_rank_env(around | {name: "4"})
    assert read_rank_env(TORCHRUN | {name: "8"}).launcher == "torchrun"
    assert read_rank_env(SLURM | {name: "12"}).launcher == "slurm"


ODD = ("", "0", "1", "-1", "8", "x", "1.5", " 2", "٣", "9" * 20, "n[1-", "4(x99999999999)", "(x2)")


def test_whatever_a_launcher_sets_is_a_possible_rank_or_a_message():
    draw = random.Random(0)
    for _ in range(20_000):
        variables = dict(draw.choice([TORCHRUN, SLURM, {}]))
        for _ in range(draw.randint(1, 3)):
            variables[draw.choice([*TORCHRUN, *SLURM])] = draw.choice(ODD)
        with contextlib.suppress(PlaceError):
            env = read_rank_env(variables)
            assert 0 <= env.rank < env.world_size and 0 <= env.local_rank < env.local_world_size
            single = env.launcher == "single"
            assert single or (env.master_addr.strip() and 0 < env.master_port < 1 << 16)


def test_imports_no_torch():
    modules = "fivefold.train.ranks.rank_env, fivefold.hardware"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
