"""An import and an export hold one tensor at a time; an export of a run one chunk of it."""

import weakref

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_models as small

from maxdiloco.checkpoint import arrays
from maxdiloco.huggingface import safetensors_files

ROW = 8 * 4  # bytes of a row of the embedding
LARGEST = 31 * ROW  # of all tensors: the embedding
OF_LAYERS = 3 * 12 * ROW  # of all leaves: of three layers


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


def thirds(shape):
    """As devices write a leaf: all layers, and a part of every other dim."""
    return (shape[0], *[(n + 2) // 3 for n in shape[1:]])


@pytest.mark.parametrize(
    ("chunk", "multiple", "dtype", "reads", "most"),
    [
        (None, 1, np.float32, len(small.shapes()), LARGEST),
        (thirds, 1, np.float32, None, LARGEST),
        (thirds, 1, ml_dtypes.bfloat16, None, LARGEST),
        # As one device writes it: the leaves of a llama, the largest of three layers.
        (lambda shape: shape, 1, np.float32, 12, OF_LAYERS),
        # 32 rows in chunks of 9; the last has 4 of 5, and so do a head's columns.
        (lambda shape: tuple(min(n, 9) for n in shape), 16, np.float32, None, OF_LAYERS),
    ],
)
def test_an_import_holds_one_tensor_and_an_export_one_chunk(
    source, tmp_path, monkeypatch, chunk, multiple, dtype, reads, most
):
    """chunk: gives the shape of a leaf's chunks in the checkpoint; None: as an import has them."""
    right = ocp.type_handlers.get_json_tspec_write

    def chunked(info, *, global_shape, local_shape, **options):
        return right(info, global_shape=global_shape, local_shape=chunk(global_shape), **options)

    if chunk:
        monkeypatch.setattr(ocp.type_handlers, "get_json_tspec_write", chunked)
    watch = Watch(monkeypatch, safetensors_files, "read")
    small.done("import", source, tmp_path / "ours", f"vocab_multiple={multiple}")
    assert len(watch.sizes) == len(small.shapes()) and max(watch.sizes) == LARGEST
    watch = Watch(monkeypatch, arrays.Reader, "read")
    name = np.dtype(dtype).name
    small.done("export", tmp_path / "ours", tmp_path / "theirs", f"dtype={name}")
    assert max(watch.sizes) <= most and (not reads or len(watch.sizes) == reads)
    if multiple == 1:
        assert sum(watch.sizes) == sum(value.nbytes for value in small.weights().values())
    rounded = {name: value.astype(dtype) for name, value in small.weights().items()}
    small.assert_weights(tmp_path / "theirs", rounded)
