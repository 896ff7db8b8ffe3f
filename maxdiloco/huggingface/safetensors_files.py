"""Read and write safetensors files tensor by tensor.

The package safetensors reads the files. To write a file, it needs all tensors in memory. This
module therefore writes the header itself (8 bytes of length, then JSON) and maps the rest.
"""

import functools
import json
import math
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxdiloco import json_text, small_files
from maxdiloco.data import packages
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.huggingface import bucket_tensors
from maxdiloco.huggingface.folders import Folder
from maxdiloco.storage.store import is_local

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = MappingProxyType({
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
})  # fmt: skip
_ROWS = 4096  # rows of each of two compared tensors that are in memory at the same time
_ALIGNMENT = 8  # alignment of the first tensor's bytes, as in files that the package writes


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      name: name of the tensor in the file.
      file: the file.
      shape: shape of the tensor.
      dtype: the format's name of its dtype, such as BF16.
      begin: offset of the tensor in bytes, if the file is in a bucket.
    """

    name: str
    file: Folder
    shape: tuple[int, ...]
    dtype: str
    begin: int = 0


Written = tuple[tuple[int, ...], np.dtype]  # shape and dtype of a tensor to write
Files = dict[str, Callable[[], np.memmap]]  # {tensor: function that maps its values in the file}


def package() -> types.ModuleType:
    """Return the package safetensors. Raises ConfigError if it is not installed."""
    return packages.require("safetensors", "A model of Hugging Face", extra="hf")


def tensors_of(folder: Folder) -> dict[str, StoredTensor]:
    """Return {name: tensor} of all files of a model. Only the headers are read.

    Raises:
      CheckpointError: a file is missing, truncated or otherwise damaged.
    """
    found = {}
    for file in _files(folder):
        header = nullcontext(file) if is_local(file) else bucket_tensors.local_header(file)
        with header as path, _opened(file, path) as opened:
            begins = {} if is_local(file) else bucket_tensors.tensor_offsets(path)
            for name in opened.keys():
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                found[name] = StoredTensor(name, file, shape, dtype, begins.get(name, 0))
    return found


def _files(folder: Folder) -> list[Folder]:
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).is_file():
            return [folder / SINGLE]
        raise CheckpointError(
            f"SRC={folder} holds neither {INDEX} nor {SINGLE}. Give the folder of a downloaded "
            "model with its weights. transformers converts PyTorch's .bin files: load and save it."
        )
    try:
        names = sorted(set(json_text.parse(small_files.read_bytes(index))["weight_map"].values()))
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}. Download it again.") from error
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise CheckpointError(
                f"{index} names {name}, which is not a file of its folder: files elsewhere are not "
                "read. Download the model again, from a source that you trust."
            )
    return files


def read(tensor: StoredTensor, rows: slice = slice(None)) -> np.ndarray:
    """Read a tensor, or some of its rows.

    The file is opened and closed for each tensor, so that its mapped pages are released.

    Raises:
      CheckpointError: the file cannot be read.
    """
    if not is_local(tensor.file):
        of = (tensor.shape, numpy_dtype(tensor))
        return bucket_tensors.read(tensor.file, tensor.begin, *of, rows)
    with _opened(tensor.file, tensor.file) as opened:
        return opened.get_slice(tensor.name)[rows]


def equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors have equal values. _ROWS rows at a time are read by `read`."""
    if one.shape != other.shape:
        return False
    for tensor in (one, other):
        numpy_dtype(tensor)
    parts = [slice(i, min(i + _ROWS, one.shape[0])) for i in range(0, one.shape[0], _ROWS)]
    return all(np.array_equal(read(one, part), read(other, part)) for part in parts)


def _opened(file: Folder, path: os.PathLike) -> Any:
    """Open `path`, the file itself or a copy of its header. Raises CheckpointError."""
    module = package()
    try:
        return module.safe_open(path, framework="numpy")
    except (module.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file: {error}. Download it again."
        ) from error


def numpy_dtype(tensor: StoredTensor) -> np.dtype:
    """Return the dtype of a tensor. Raises CheckpointError for quantised weights."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{tensor.name} has type {tensor.dtype}: quantised weights are not imported. Save the "
            "model with bfloat16 weights: transformers' from_pretrained(..., "
            "dtype=torch.bfloat16), dequantize() if it has one, then save_pretrained."
        )
    return DTYPES[tensor.dtype]


def nbytes_of(text: str) -> int:
    """Return the number of bytes of a size such as `5GB` or `200MB`. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(KB|MB|GB)", text, re.IGNORECASE)
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    size = float(found[1]) * units[found[2].upper()] if found else 0
    if size < 1:
        raise ConfigError(
            f"max_shard_size={text}: expected a number and KB, MB or GB, such as 5GB."
        )
    return int(size)


def begin(folder: pathlib.Path, written: Mapping[str, Written], max_bytes: int) -> Files:
    """Create the files of a model and, if there are several, their index.

    Args:
      folder: the folder of the files.
      written: {name: shape and dtype} of the tensors, in the order of the files.
      max_bytes: largest size of a file. A file with a single tensor may be larger.

    Returns:
      For each tensor a function that maps its values for writing.

    Raises:
      OSError: a file cannot be written.
    """
    hub = packages.require("huggingface_hub", "An export", extra="hf")
    split = hub.split_state_dict_into_shards_factory(
        written,
        get_storage_size=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
    found: Files = {}
    for file, names in split.filename_to_tensors.items():
        found |= _begin(folder / file, {name: written[name] for name in names})
    return found


def _begin(path: pathlib.Path, written: Mapping[str, Written]) -> Files:
    """Write the header of a file and reserve the space of its tensors.

    Without the reservation a full disk would kill the program with SIGBUS.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = end = 0
    for name, (shape, dtype) in written.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    first = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, first + end)
    found = {}
    for name, (shape, dtype) in written.items():
        at = first + header[name]["data_offsets"][0]
        found[name] = functools.partial(np.memmap, path, dtype, "r+", at, shape)
    return found
