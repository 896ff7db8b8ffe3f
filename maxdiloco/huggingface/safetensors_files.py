"""Files of safetensors, read and written tensor by tensor.

A file is: the length of a header, 8 bytes; the header, JSON; the tensors' bytes. The package
safetensors reads them. It writes a file from tensors that are all in memory, so a file is written
here, at the place that the header gives each tensor.
"""

import json
import os
import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from maxdiloco import json_text
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.huggingface import tensors
from maxdiloco.huggingface.tensors import Part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = MappingProxyType({
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
})  # fmt: skip
_COMPARED_ROWS = 4096  # in memory at once, of two tables for tokens; our choice
_ALIGNMENT = 8  # of the first tensor's bytes, as the package has it


class Stored(NamedTuple):
    """A tensor of a file. dtype: the format's name, such as BF16."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


class Written(NamedTuple):
    """A tensor to write. dtype: numpy's."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def package() -> Any:
    """The package safetensors. Raises ConfigError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed, which Hugging Face's files need: pip install -e '.[hf]' "
            "in a checkout of maxdiloco."
        ) from error
    return safetensors


def tensors_of(folder: pathlib.Path) -> dict[str, Stored]:
    """{name: tensor} of all files of a model; reads the headers alone.

    Raises CheckpointError for a missing, truncated or otherwise damaged file.
    """
    found = {}
    for file in _files(folder):
        with _opened(file) as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
    return found


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        other = min((path.name for path in folder.glob("*.bin")), default=None)
        raise CheckpointError(
            f"SRC={folder} holds neither {INDEX} nor {SINGLE}. "
            + (
                f"{other} is PyTorch's format: save the model with transformers, which writes "
                "safetensors."
                if other
                else "Give the folder of a downloaded model, with its weights."
            )
        )
    try:
        names = sorted(set(json_text.parse(index.read_bytes())["weight_map"].values()))
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}. Download it again.") from error
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise CheckpointError(
                f"{index} names {name}, which is no file of its folder: files elsewhere are not "
                "read. Download the model again, from a source that you trust."
            )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"SRC={folder} lacks {', '.join(missing)}, which {INDEX} names. Download the model "
            "again."
        )
    return files


def read(tensor: Stored, name: str) -> np.ndarray:
    """The values of a tensor. Raises CheckpointError.

    The file is opened for each tensor: its pages in memory are given back.
    """
    with _opened(tensor.file) as opened:
        return opened.get_tensor(name)


def equal(one: tuple[str, Stored], other: tuple[str, Stored]) -> bool:
    """Whether two tensors, each with its name, have the same values, read some rows at a time.

    Raises CheckpointError.
    """
    (name, tensor), (other_name, other_tensor) = one, other
    if tensor.shape != other_tensor.shape:
        return False
    for key, stored in (one, other):
        numpy_dtype(key, stored.dtype)
    with _opened(tensor.file) as here, _opened(other_tensor.file) as there:
        mine, theirs = here.get_slice(name), there.get_slice(other_name)
        ends = [*range(_COMPARED_ROWS, tensor.shape[0], _COMPARED_ROWS), tensor.shape[0]]
        return all(
            np.array_equal(mine[start:end], theirs[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        )


def _opened(file: pathlib.Path) -> Any:
    module = package()
    try:
        return module.safe_open(file, framework="numpy")
    except (module.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is no whole file of safetensors: {error}. Download it again."
        ) from error


def numpy_dtype(name: str, dtype: str) -> np.dtype:
    """The dtype of a tensor. Raises CheckpointError for one that holds no plain weights."""
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{name} has type {dtype}: quantised weights are not imported. Save the model with "
            "bfloat16 weights: transformers' from_pretrained(..., dtype=torch.bfloat16), "
            "dequantize() where it has one, then save_pretrained."
        )
    return DTYPES[dtype]


def nbytes_of(text: str) -> int:
    """`5GB` or `200MB` in bytes. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(KB|MB|GB)", text, re.IGNORECASE)
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    size = float(found[1]) * units[found[2].upper()] if found else 0
    if size < 1:
        raise ConfigError(
            f"max_shard_size={text} is no size of a file. Use a number and KB, MB or GB: 5GB."
        )
    return int(size)


class Writer:
    """Writes tensors in any order to files of at most max_bytes, or of one tensor.

    written: {name: shape and dtype}, in the order that they have in the files.
    """

    def __init__(self, folder: pathlib.Path, written: Mapping[str, Written], max_bytes: int):
        self._place: dict[str, tuple[pathlib.Path, int, Written]] = {}
        shards: list[dict[str, Written]] = [{}]
        size = 0
        for name, tensor in written.items():
            if shards[-1] and size + tensor.nbytes > max_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        if len(shards) == 1:
            files = [SINGLE]
        else:
            total = sum(tensor.nbytes for tensor in written.values())
            weight_map = {
                name: file for file, shard in zip(files, shards, strict=True) for name in shard
            }
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
        for file, shard in zip(files, shards, strict=True):
            self._begin(folder / file, shard)

    def _begin(self, path: pathlib.Path, shard: Mapping[str, Written]) -> None:
        """The header, and the place of the tensors, which the disk has to have.

        A full disk would kill a program that writes to a mapped file.
        """
        names = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in shard.items():
            end = offset + tensor.nbytes
            header[name] = {
                "dtype": names[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        for name, tensor in shard.items():
            begin = 8 + len(text) + header[name]["data_offsets"][0]
            self._place[name] = (path, begin, tensor)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)

    def put(self, part: Part, box: tuple[slice, ...], values: np.ndarray) -> None:
        """Write a box of a part of a tensor, see tensors.put. Raises OSError."""
        tensors.put(self.values(part.name), part, box, values)

    def values(self, name: str) -> np.ndarray:
        """The values of a tensor in its file, to be written to. Raises OSError."""
        path, begin, tensor = self._place[name]
        return np.memmap(path, tensor.dtype, "r+", begin, tensor.shape)
