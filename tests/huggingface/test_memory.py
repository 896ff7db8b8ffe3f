"""An import and an export hold one tensor at a time; an export of a run one chunk of it."""

import weakref

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_models as small
from safetensors.numpy import load_file

from maxdiloco import hf
from maxdiloco.checkpoint import by_part
from maxdiloco.huggingface import safetensors_files

ROW = 8 * 4  # bytes of a row of the embedding
LARGEST = 31 * ROW  # of all tensors: the embedding


class Watch:
    """Sizes of the arrays that a function returned; all must be gone when it is called again."""

    def __init__(self, monkeypatch, owner, name):
        self.sizes, self.last, right = [], lambda: None, vars(owner)[name]

        def watched(*args):
            assert self.last() is None, "the array before it is still in memory"
            values = right(*args)
            self.sizes.append(values.nbytes)
            self.last = weakref.ref(values)
            return values

        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def source(tmp_path):
    return small.save(tmp_path / "theirs", small.weights())


@pytest.fixture
def chunks(monkeypatch):
    """A list: the function that gives the chunk shape of a leaf's shape when one is written."""
    right, of_shape = ocp.type_handlers.get_json_tspec_write, []

    def changed(info, *, global_shape, local_shape, **options):
        shape = of_shape[0](global_shape) if of_shape else local_shape
        return right(info, global_shape=global_shape, local_shape=shape, **options)

    monkeypatch.setattr(ocp.type_handlers, "get_json_tspec_write", changed)
    return of_shape


def assert_same(folder, dtype=np.float32):
    found = load_file(folder / "model.safetensors")
    expected = {name: value.astype(dtype) for name, value in small.weights().items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name


def test_an_import_reads_one_tensor_at_a_time(source, tmp_path, monkeypatch):
    watch = Watch(monkeypatch, safetensors_files, "read")
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert len(watch.sizes) == len(small.shapes()) and max(watch.sizes) == LARGEST


def test_an_export_of_an_import_reads_one_tensor_at_a_time(source, tmp_path, monkeypatch):
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    watch = Watch(monkeypatch, by_part.Reader, "read")
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    assert len(watch.sizes) == len(small.shapes()) and max(watch.sizes) == LARGEST
    assert_same(tmp_path / "again")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_of_a_run_reads_one_chunk_or_one_tensor(
    source, tmp_path, monkeypatch, chunks, dtype
):
    """As devices write a leaf: all layers, and a part of every other dim."""
    chunks.append(lambda shape: (shape[0], *[(n + 2) // 3 for n in shape[1:]]))
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    watch = Watch(monkeypatch, by_part.Reader, "read")
    arguments = ["export", str(tmp_path / "ours"), str(tmp_path / "again"), f"dtype={dtype}"]
    assert hf.main(arguments) == 0
    assert max(watch.sizes) <= LARGEST < 3 * 8 * 12 * 4  # bytes of a leaf of three layers
    assert sum(watch.sizes) == sum(value.nbytes for value in small.weights().values())
    assert_same(tmp_path / "again", {"bfloat16": ml_dtypes.bfloat16}.get(dtype, np.float32))


def test_a_leaf_that_is_one_chunk_is_read_once(source, tmp_path, monkeypatch, chunks):
    """As one device writes it."""
    chunks.append(lambda shape: shape)
    assert hf.main(["import", str(source), str(tmp_path / "ours")]) == 0
    watch = Watch(monkeypatch, by_part.Reader, "read")
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    assert len(watch.sizes) == 12  # the leaves of a llama
    assert_same(tmp_path / "again")


def test_rows_that_an_export_leaves_out_are_left_out_of_every_chunk(source, tmp_path, chunks):
    """32 rows in chunks of 9; the last has 4 of 5, and of a head's columns likewise."""
    chunks.append(lambda shape: tuple(min(n, 9) for n in shape))
    arguments = ["import", str(source), str(tmp_path / "ours"), "vocab_multiple=16"]
    assert hf.main(arguments) == 0
    assert hf.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    assert_same(tmp_path / "again")
