"""Clusters by name and from files."""

from dataclasses import replace

import pytest

from fivefold.errors import ConfigError
from fivefold.hardware import GPUS
from fivefold.predict.cluster import preset
from fivefold.predict.cluster_file import load_cluster, to_toml


@pytest.mark.parametrize("name", GPUS)
def test_every_kind_of_gpu_is_a_cluster_that_can_be_written_and_read_back(name, tmp_path):
    cluster = replace(preset(name, 16), price_per_gpu_hour=2.5)
    assert cluster.gpu is GPUS[name]
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster))
    assert load_cluster(path) == cluster


def test_names_are_forgiving_and_wrong_ones_are_explained():
    assert load_cluster("h100").gpu.name == "H100"
    assert load_cluster("H100-96/500W/2.4TBs").gpu.name == "H100-96"
    assert load_cluster("GB200").gpus_per_node == 72
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        load_cluster("H10O")


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'preset = "H100"\nnum_gpus = 64\n'
        "[gpu.matmul]\nbf16 = 7e14\n[network_link]\nbandwidth = 25e9\n"
    )
    cluster, plain = load_cluster(path), preset("H100", 64)
    assert cluster.gpu.matmul.bf16 == 7e14
    assert cluster.gpu.matmul.fp8 == plain.gpu.matmul.fp8
    assert cluster.network_link == replace(plain.network_link, bandwidth=25e9)
    assert cluster.node_link == plain.node_link
    assert load_cluster(path, 128).num_gpus == 128


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'preset = "H100"\nnum_gpu = 64\n[gpu]\nlaunch = "fast"\n[node_link]\nrate = 1\n'
    )
    with pytest.raises(ConfigError) as raised:
        load_cluster(path)
    text = str(raised.value)
    path.write_text(path.read_text().replace("H100", "H10"))
    with pytest.raises(ConfigError, match=r"did you mean 'H100'(?s:.*)unknown key node_link\.rate"):
        load_cluster(path)
    assert "unknown key num_gpu, did you mean 'num_gpus'?" in text
    assert "gpu.launch must be a number" in text
    assert "unknown key node_link.rate" in text


def test_a_gpu_of_ones_own_must_be_told_whole(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "mine"\nnum_gpus = 8\ngpus_per_node = 8\n[gpu]\nname = "Z1"\n')
    with pytest.raises(ConfigError, match=r"gpu\.memory_bandwidth is missing"):
        load_cluster(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_text("gpu =")
    with pytest.raises(ConfigError, match="not TOML"):
        load_cluster(path)
