"""Writes .safetensors files with the same errors and permissions as any other file.

Their library hides the system's error messages, and makes files that only their owner may read.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fivefold.files import atomic_path

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # of safetensors' message


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and texts by name, atomically.

    Raises:
        OSError: the file system did not take them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with atomic_path(path) as temporary:
            temporary.touch()
            usual = temporary.stat().st_mode
            save_file(dict(tensors), temporary, dict(metadata))
            temporary.chmod(usual)
    except SafetensorError as error:
        if (found := _SYSTEM_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
