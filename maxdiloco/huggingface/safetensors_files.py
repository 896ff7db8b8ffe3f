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
from typing import Any, NamedTuple

import numpy as np

from maxdiloco import json_text
from maxdiloco.errors import CheckpointError, ConfigError
from maxdiloco.huggingface import tensors
from maxdiloco.huggingface.tensors import Part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# numpy's name -> that of the format, of the types that weights have.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NUMPY = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FILL_BYTES = 1 << 20  # our choice
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
    module, found = package(), {}
    for file in _files(folder):
        with _opened(module, file) as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
    return found


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise CheckpointError(
            f"SRC={folder} holds neither {INDEX} nor {SINGLE}. "
            + (
                f"{others[0]} is PyTorch's format: save the model with transformers, which writes "
                "safetensors."
                if others
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
    module = package()
    with _opened(module, tensor.file) as opened:
        return opened.get_tensor(name)


def equal(one: tuple[str, Stored], other: tuple[str, Stored]) -> bool:
    """Whether two tensors of a name have the same values, read some rows at a time.

    Raises CheckpointError.
    """
    (name, tensor), (other_name, other_tensor) = one, other
    if tensor.shape != other_tensor.shape:
        return False
    for key, stored in (one, other):
        numpy_dtype(key, stored.dtype)
    module = package()
    with _opened(module, tensor.file) as here, _opened(module, other_tensor.file) as there:
        mine, theirs = here.get_slice(name), there.get_slice(other_name)
        num_rows = tensor.shape[0]
        boxes = [
            slice(i, min(i + _COMPARED_ROWS, num_rows)) for i in range(0, num_rows, _COMPARED_ROWS)
        ]
        return all(np.array_equal(mine[rows], theirs[rows]) for rows in boxes)


def _opened(module: Any, file: pathlib.Path) -> Any:
    try:
        return module.safe_open(file, framework="numpy")
    except (module.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is no whole file of safetensors: {error}. Download it again."
        ) from error


def numpy_dtype(name: str, dtype: str) -> np.dtype:
    """The dtype of a tensor. Raises CheckpointError for one that holds no plain weights."""
    import ml_dtypes

    if dtype not in _NUMPY:
        raise CheckpointError(
            f"{name} has type {dtype}: quantised weights are not imported. Save the model with "
            "bfloat16 weights: transformers' from_pretrained(..., dtype=torch.bfloat16), "
            "dequantize() where it has one, then save_pretrained."
        )
    return np.dtype(ml_dtypes.bfloat16) if dtype == "BF16" else np.dtype(_NUMPY[dtype])


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

    tensors: {name: shape and dtype}, in the order that they have in the files.
    """

    def __init__(self, folder: pathlib.Path, tensors: Mapping[str, Written], max_bytes: int):
        self._folder = folder
        self._place: dict[str, tuple[pathlib.Path, int, Written]] = {}
        self._filled: set[str] = set()
        shards: list[dict[str, Written]] = [{}]
        size = 0
        for name, tensor in tensors.items():
            if shards[-1] and size + tensor.nbytes > max_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        names = [SINGLE]
        if len(shards) > 1:
            names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _counted(shards)]
            self._write_index(dict(zip(names, shards, strict=True)))
        for name, shard in zip(names, shards, strict=True):
            self._begin(folder / name, shard)

    def _begin(self, path: pathlib.Path, tensors: Mapping[str, Written]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            end = offset + tensors[name].nbytes
            header[name] = {
                "dtype": DTYPES[dtype.name],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        for name, tensor in tensors.items():
            begin = 8 + len(text) + header[name]["data_offsets"][0]
            self._place[name] = (path, begin, tensor)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)

    def _write_index(self, shards: Mapping[str, Mapping[str, Written]]) -> None:
        total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")

    def write(self, name: str, values: np.ndarray) -> None:
        """Write the values of a tensor. Raises OSError."""
        path, begin, tensor = self._place[name]
        assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype)
        with open(path, "r+b") as file:
            file.seek(begin)
            file.write(values.reshape(-1).view(np.uint8).data)

    def put(self, name: str, part: Part, box: tuple[slice, ...], values: np.ndarray) -> None:
        """Write a box of a part of a tensor, see tensors.put. Raises OSError."""
        _, _, tensor = self._place[name]
        if part.tensor.half is None and values.shape == part.part_shape:
            whole = np.empty(tensor.shape, tensor.dtype)
            tensors.put(whole, part, box, values)
            self.write(name, whole)
        else:
            tensors.put(self._mapped(name), part, box, values)

    def _mapped(self, name: str) -> np.ndarray:
        """The values of a tensor in its file, to write pieces of them to.

        Its place on the disk is filled first: a full disk would kill a program that writes to it.
        """
        path, begin, tensor = self._place[name]
        if name not in self._filled:
            self._filled.add(name)
            with open(path, "r+b") as file:
                file.seek(begin)
                for written in range(0, tensor.nbytes, _FILL_BYTES):
                    file.write(bytes(min(_FILL_BYTES, tensor.nbytes - written)))
        return np.memmap(path, tensor.dtype, "r+", begin, tensor.shape)


def _counted(shards: list) -> range:
    return range(1, len(shards) + 1)


def sync(folder: pathlib.Path) -> None:
    """Force the files of a folder to the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
