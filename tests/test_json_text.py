"""JSON that a stranger wrote never ends in a traceback, whichever file of a run it is."""

import hashlib
import json
import zlib

import pytest
from etils import epath

from maxdiloco import json_text
from maxdiloco.checkpoint import find, orbax_io, seal
from maxdiloco.data import line_index, shards, tokenizer
from maxdiloco.errors import CheckpointError, DataError
from maxdiloco.metrics import history, writer
from maxdiloco.page import run as page
from maxdiloco.preparation import prepare
from maxdiloco.storage import object_lock
from maxdiloco.storage.run_folder import RunFolder

DEEP = "[" * 100_000


def test_nesting_without_end_is_a_value_error():
    """json raises RecursionError, which callers that expect a broken text do not catch."""
    assert json_text.parse(b'{"a": [1, null]}') == {"a": [1, None]}
    for text in (DEEP, '{"a":' * 100_000, DEEP.encode()):
        with pytest.raises(ValueError, match="its values are nested too deeply"):
            json_text.parse(text)
    with pytest.raises(ValueError, match="Expecting value"):
        json_text.parse("")


def test_lines_of_a_run_that_are_nested_without_end_are_broken_lines(tmp_path):
    folder = RunFolder(epath.Path(tmp_path))
    line = json.dumps({"event": "start"})
    folder.history.write_text(f"{line}\n{DEEP}\n")
    assert history.read(folder) == [{"event": "start"}]
    assert writer._step_of(DEEP) is None and page._row(DEEP.encode()) is None
    assert object_lock._read(DEEP) == ("an unknown process", "")


def test_files_of_a_checkpoint_that_are_nested_without_end_are_damage(tmp_path):
    """newest_meta goes on to the checkpoint before; what reads the one it names says which."""
    folder = epath.Path(tmp_path)
    (folder / seal.FILE).write_text(DEEP)
    assert seal.damage(folder).what == f"{seal.FILE} is damaged"
    for content in (DEEP, "[]", '{"step": 1}'):
        (folder / orbax_io.META).mkdir(exist_ok=True)
        (folder / orbax_io.META / "metadata").write_text(content)
        with pytest.raises(CheckpointError, match="meta of .* is damaged: .* Use another"):
            orbax_io.read_note(folder)
        with pytest.raises(CheckpointError, match="RUN=.* holds no checkpoint"):
            find.newest_meta(folder, key="RUN")


def test_files_of_data_that_are_nested_without_end_are_damaged(tmp_path):
    checksum = hashlib.sha256(DEEP.encode()).hexdigest()
    (tmp_path / shards.MANIFEST).write_text(f"{checksum}\n{DEEP}\n")
    with pytest.raises(DataError, match="manifest.json is damaged: its values are nested"):
        shards.read_manifest(str(tmp_path), "dataset_path=x")
    (tmp_path / tokenizer.SETTINGS).write_text(DEEP)
    with pytest.raises(DataError, match="holds no saved tokenizer: its values are nested"):
        tokenizer.load(tmp_path)
    assert prepare._begun_with(DEEP) == prepare._begun_with("[]") == {}
    index = line_index.LineIndex("text", report=print)
    body = f"{DEEP}\n".encode()
    (tmp_path / "index").write_bytes(line_index._head(zlib.crc32(body)) + body)
    index.load(epath.Path(tmp_path / "index"))
