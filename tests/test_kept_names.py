"""Names in files of runs are those that earlier versions wrote: a name that is missing there has
its default, without a word."""

from typing import Any, get_type_hints

import pytest

from fivefold.audit.record import RankRecord
from fivefold.checkpoint.integrity import _File, _Manifest
from fivefold.counts.routed import StepChoices
from fivefold.data.loader import LoaderState
from fivefold.hardware import Gpu
from fivefold.optim.loss_scale import ScaleState
from fivefold.pipeline.costs.measured import MeasuredAct
from fivefold.predict.cluster import Cluster, Link
from fivefold.report.audited import _Line
from fivefold.report.page import _Load
from fivefold.train.folder.lock import Owner
from fivefold.train.folder.run_folder import _Entry
from fivefold.train.folder.saved_state import SavedState

KEPT: dict[type, str] = {
    RankRecord: """
        rank step sent parameters gradients optimizer activations multiplications packed any_packed
        document_length chosen peak_allocated world_size operations layer_operations waits rooms
        scales host disk to_host from_host state_moving state_waited brought moving waited
    """,
    StepChoices: "every first again",
    SavedState: "step loader model seq_length losses loss_scale skipped",
    LoaderState: "consumed_samples fingerprint",
    ScaleState: "scale good_steps overflows",
    _Manifest: "files",
    _File: "size crc32",
    _Entry: "time command folder host devices variables step settings after",
    _Line: "step tokens seconds grad_norm",
    _Load: "tokens",
    Owner: "host machine pid since begun",
    MeasuredAct: "rank kind stage mb start end slice part",
    Cluster: """
        name gpu num_gpus gpus_per_node node_link network_link host_bandwidth host_memory_bytes
        host_memory_bandwidth disk_bytes disk_bandwidth reserved_bytes memory_margin jitter
        host_operation interruptions_per_gpu_day price_per_gpu_hour
    """,
    Gpu: """
        name memory_bytes memory_bandwidth peak matmul multiprocessors sustained sustained_narrow
        attention_forward attention_backward flash1 flash2 memory_efficiency launch
        overlap_slowdown
    """,
    Link: "bandwidth latency efficiency",
}


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__.strip("_"))
def test_what_is_read_from_files_has_the_names_that_were_written(kind: Any) -> None:
    assert {*get_type_hints(kind)} == {*KEPT[kind].split()}
