"""Data sets are compared by contents: names and folders do not count, the text does."""

import numpy as np
import pytest

from maxdiloco.data import pipeline
from maxdiloco.data.documents import SAMPLE_BYTES, SAMPLES, sampled


@pytest.mark.parametrize("sizes", [[1], [3 * SAMPLE_BYTES + 1], [5000, 1, 100, 9000] * 10])
def test_all_of_a_small_text_is_compared(sizes):
    seen = [np.zeros(size, bool) for size in sizes]
    for document, begin, end in sampled(np.array(sizes)):
        assert begin < end
        seen[document][begin:end] = True
    assert all(each.all() for each in seen)


@pytest.mark.parametrize("sizes", [[5_000_000] * 10_000, [7] * 3_000_000, [50_000_000_000]])
def test_a_start_reads_a_bounded_part_of_a_large_text_from_all_of_its_stretches(sizes):
    sizes = np.array(sizes, np.int64)
    pieces = sampled(sizes)
    assert SAMPLES <= len(pieces) <= 2 * SAMPLES
    assert sum(end - begin for _, begin, end in pieces) <= 2 * SAMPLES * SAMPLE_BYTES
    starts = np.cumsum(sizes) - sizes
    places = [int(starts[document]) + begin for document, begin, _ in pieces]
    assert places == sorted(places)
    assert max(np.diff([*places, int(sizes.sum())])) <= sizes.sum() / SAMPLES + 1


def test_the_same_text_elsewhere_is_the_same_and_other_text_of_that_length_is_not(settings, folder):
    """Also where it is a line of a .jsonl file; the fingerprint, of names and lengths, differs."""
    root = folder(
        {
            "here/1.txt": b"abcdefgh" * 9,
            "there/deep/2.txt": b"abcdefgh" * 9,
            "lines/1.jsonl": b'{"text": "' + b"abcdefgh" * 9 + b'"}\n',
            "other/1.txt": b"abcdefgh" * 8 + b"abcdefgi",
        }
    )

    def opened(name):
        return pipeline.open_dataset(settings(dataset_path=f"{root}/{name}"), split="train")

    here, there, lines, other = map(opened, ("here", "there", "lines", "other"))
    assert here.contents == there.contents == lines.contents
    assert here.fingerprint != there.fingerprint
    assert here.contents != other.contents
    assert here.fingerprint == other.fingerprint
