"""An index file of the documents in .jsonl files, so that a restart need not read them through.

# D documents of a file
"""

import json
import zlib
from collections.abc import Callable

import numpy as np
from etils import epath

from maxdiloco import json_text
from maxdiloco.data.corpus import Stamp
from maxdiloco.storage import durable

# With a checksum of the rest. Count its number up when the tokenizer changes documents' sizes.
_HEAD = b"maxdiloco line index 1 %08x\n"


class LineIndex:
    """Documents of .jsonl files, by path; a NUL and a field follow that of another than column."""

    def __init__(self, column: str, report: Callable[[str], None] = lambda line: None):
        self.column = column  # the field that holds the text
        self.report = report  # called with one line for the user
        # Of a file int64 [D, 3]: offset and length of a line, size of its text [bytes].
        self._loaded: dict[str, tuple[Stamp, np.ndarray]] = {}
        self._used: dict[str, tuple[Stamp, np.ndarray]] = {}
        self._changed = False

    def find(self, path: str, stamp: Stamp) -> np.ndarray | None:
        """Documents of a file; None when it is unknown or has changed."""
        for known in (self._used, self._loaded):
            if path in known and known[path][0] == stamp:
                self._used[path] = known[path]
                return known[path][1]
        return None

    def add(self, path: str, stamp: Stamp, documents_D3: np.ndarray) -> None:
        """Remember a file that has been read through."""
        self._used[path] = (stamp, documents_D3)
        self._changed = True

    def load(self, path: epath.Path) -> None:
        """Read what `save` wrote; a missing, damaged or other file is ignored. Raises OSError."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        begin = data.find(b"\n") + 1
        if data[:begin] != _HEAD % zlib.crc32(memoryview(data)[begin:]):
            self.report(f"note: {path} is damaged or of another version: .jsonl files are read.")
            return
        end = data.index(b"\n", begin) + 1
        about = json_text.parse(data[begin:end])
        if about["column"] != self.column:
            return
        documents_D3 = np.frombuffer(data, "<i8", offset=end).reshape(-1, 3)
        ends = np.cumsum([count for *_, count in about["files"]], dtype=np.int64)
        for (name, size, mtime, count), stop in zip(about["files"], ends, strict=True):
            self._loaded[name] = (Stamp(size, mtime), documents_D3[stop - count : stop])

    def save(self, path: epath.Path) -> None:
        """Write the index of the files in use, unless it has not changed. Raises OSError."""
        if not self._changed:
            return
        files = [[name, *stamp, len(table)] for name, (stamp, table) in self._used.items()]
        about = json.dumps({"column": self.column, "files": files}).encode() + b"\n"
        documents_D3 = np.concatenate([table for _, table in self._used.values()]).astype("<i8")
        checksum = zlib.crc32(documents_D3, zlib.crc32(about))
        with durable.replacing(path) as part:
            part.write_bytes(b"".join([_HEAD % checksum, about, documents_D3]))
        self._changed = False
