"""Windows of a text, worked out by hand, and what tells two texts apart."""

import numpy as np
import pytest

from maxdiloco.data import pipeline, text
from maxdiloco.data.documents import SAMPLE_BYTES, SAMPLES, sampled
from maxdiloco.errors import DataError

S = 256  # the token that starts a document
a, b, c, d, e, f = b"abcdef"


@pytest.mark.parametrize(
    ("texts", "keys", "tokens", "segments"),
    [
        (  # S a b c | S d e S | f, which is too short and not read
            (b"abc", b"de", b"f"),
            {},
            [[S, a, b, c], [S, d, e, S]],
            [[1, 1, 1, 1], [1, 1, 1, 2]],
        ),
        (  # a document goes on in the next window, as segment 1
            (b"abc", b"de", b"f"),
            {"max_target_length": 3},
            [[S, a, b], [c, S, d], [e, S, f]],
            [[1, 1, 1], [1, 2, 2], [1, 2, 2]],
        ),
        (  # each begins a window and is padded with segment 0
            (b"abc", b"de", b"abcdef"),
            {"packing": False},
            [[S, a, b, c], [S, d, e, 0], [S, a, b, c], [d, e, f, 0]],
            [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]],
        ),
        (  # abcdef alone is cut; S a fits beside nothing
            (b"abc", b"de", b"abcdef", b"a"),
            {"grain_packing_type": "best_fit"},
            [[S, a, b, c], [S, d, e, 0], [S, a, b, c], [d, e, f, 0], [S, a, 0, 0]],
            [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        ),
        (  # S b c d and one of S a, S e, S f; the other two together
            (b"a", b"bcd", b"e", b"f"),
            {"grain_packing_type": "best_fit", "max_target_length": 6},
            [[S, a, S, e, 0, 0], [S, b, c, d, S, f]],
            [[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 2, 2]],
        ),
    ],
    ids=["packed", "over_two_windows", "apart", "best_fit_cuts", "best_fit_side_by_side"],
)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_windows_and_segments_by_hand(settings, folder, kind, texts, keys, tokens, segments):
    """Documents are files, or lines of one file; the windows have 4 tokens unless keys say."""
    if kind == "txt":
        root = folder({f"{number}.txt": content for number, content in enumerate(texts)})
    else:
        root = folder({"1.jsonl": b"".join(b'{"text": "%s"}\n' % content for content in texts)})
    cfg = settings(dataset_path=root, eval_dataset_path=root, **keys)  # nothing is held out
    windows, _ = text.open_text(cfg, split="train")
    found = windows.read(np.arange(windows.num_windows))
    assert found[0].dtype == found[1].dtype == np.int32
    assert (found[0].tolist(), found[1].tolist()) == (tokens, segments)


def test_any_windows_can_be_asked_for_in_any_order(settings, folder):
    root = folder({"1.txt": b"abcdefghijklmnop" * 9})
    cfg = settings(dataset_path=root, eval_dataset_path=root)
    windows, _ = text.open_text(cfg, split="train")
    tokens, _ = windows.read(np.arange(windows.num_windows))
    chosen = np.array([7, 0, 7, 3])
    assert np.array_equal(windows.read(chosen)[0], tokens[chosen])


def split_paths(cfg):
    return [
        text.open_text(cfg, split=split)[0].documents.table.paths for split in ("train", "eval")
    ]


@pytest.mark.parametrize(
    ("count", "fraction", "held"),
    [(41, 0.05, [0, 20, 40]), (16, 0.25, [0, 4, 8, 12]), (16, 0.3, [0, 3, 6, 10, 13])],
)
def test_of_many_equal_files_those_held_out_lie_apart(settings, folder, count, fraction, held):
    root = folder({f"{number:02}.txt": b"abcdefghijk" for number in range(count)})
    train, held_out = split_paths(settings(dataset_path=root, eval_fraction=fraction))
    assert held_out == tuple(f"{root}/{number:02}.txt" for number in held)
    assert len(train) == count - len(held) and not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("length", "fraction", "train", "held_out"),
    [(400, 0.05, 95, 5), (400, 0.25, 75, 25), (16, 0.05, 3, 1), (8, 0.05, 1, 1)],
)
def test_of_few_files_the_last_windows_are_held_out(
    settings, folder, length, fraction, train, held_out
):
    """Windows of 4, at least one: 400 tokens are 100 windows, 5 of them for eval."""
    text_bytes = bytes(65 + number % 61 for number in range(length - 1))
    cfg = settings(dataset_path=folder({"1.txt": text_bytes}), eval_fraction=fraction)
    parts = [text.open_text(cfg, split=split)[0] for split in ("train", "eval")]
    assert [part.num_windows for part in parts] == [train, held_out]
    tokens = [part.read(np.arange(part.num_windows))[0] for part in parts]
    assert np.concatenate(tokens).reshape(-1).tolist() == [S, *text_bytes]


def test_files_of_unequal_size_are_not_held_out_whole(settings, folder):
    """File 0 of 20 has 34 % of the bytes: the last 5 % of the windows are held out in its place.
    With 9 % of them in file 0 the file is held out, and with 2 % not."""

    def share(first, rest=660):
        root = folder({f"{i:02}.txt": bytes([97 + i]) * (rest if i else first) for i in range(20)})
        parts = [
            text.open_text(settings(dataset_path=root), split=split)[0]
            for split in ("train", "eval")
        ]
        counts = [part.num_windows for part in parts]
        return round(counts[1] / sum(counts), 3), set(parts[1].documents.table.file)

    assert share(6460) == (0.05, set(range(20)))
    assert share(1240) == (0.09, {0})
    assert share(256) == (0.05, set(range(20)))


def test_eval_fraction_zero_trains_on_all_of_the_text(settings, folder):
    root = folder({f"{number:02}.txt": b"abc" for number in range(21)})
    cfg = settings(dataset_path=root, eval_fraction=0.0)
    assert text.open_text(cfg, split="train")[0].num_windows == 21
    with pytest.raises(DataError, match="eval_fraction=0 holds nothing out. Set eval_fraction or"):
        text.open_text(cfg, split="eval")


def test_eval_text_of_ones_own_leaves_all_of_the_other_for_training(settings, folder):
    root = folder({"train/1.txt": b"abcdefg", "held/2.txt": b"fedcbag"})
    cfg = settings(dataset_path=f"{root}/train", eval_dataset_path=f"{root}/held")
    assert split_paths(cfg) == [(f"{root}/train/1.txt",), (f"{root}/held/2.txt",)]
    train, name = text.open_text(cfg, split="train")
    assert (train.num_windows, name) == (2, f"dataset_path={root}/train")
    held, name = text.open_text(cfg, split="eval")
    assert (held.num_windows, name) == (2, f"eval_dataset_path={root}/held")


@pytest.mark.parametrize("split, size", [("train", 6), ("train", 2), ("eval", 2)])
def test_a_text_without_a_sequence_for_a_split_is_told(settings, folder, split, size):
    """7 tokens are one window of 4, and that one is held out; 3 tokens are none."""
    root = folder({"1.txt": b"x" * size})
    with pytest.raises(
        DataError,
        match=rf"^dataset_path={root} is too short: its {size + 1} tokens.*max_target_length=4 "
        rf"for {split}.*lower max_target_length",
    ):
        text.open_text(settings(dataset_path=root), split=split)


def test_fingerprints_differ_when_the_windows_do(settings, folder):
    """Another length, split, packing or a file more; the folder's own name does not count."""
    eights = {f"{i}.txt": b"abcdefgh" for i in range(3)}
    more = {"3": (b"ab", "3"), "4": (b"abc", "3"), "5": (b"abc", "4")}
    root = folder({f"{top}/{name}": data for top in "12345" for name, data in eights.items()})
    folder({f"{top}/{name}.txt": data for top, (data, name) in more.items()})

    def fingerprint(split="train", top="1", **changed):
        cfg = settings(**{"dataset_path": f"{root}/{top}"} | changed)
        return text.open_text(cfg, split=split)[0].fingerprint()

    assert fingerprint() == fingerprint(top="2")
    found = [fingerprint(), fingerprint("eval"), fingerprint(packing=False)]
    # 27 tokens are two windows of 12 or 13, one of them for eval.
    found += [fingerprint(max_target_length=length) for length in (5, 12, 13)]
    found.append(fingerprint("eval", max_target_length=12))
    # 27 tokens in windows of 9 are three documents whatever the packing, of the same names.
    nines = [fingerprint(max_target_length=9, packing=packing) for packing in (True, False)]
    assert nines[0] == nines[1]
    found += [nines[0], fingerprint(max_target_length=9, grain_packing_type="best_fit")]
    # 27 tokens and 3 or 4 more are 7 windows either way; then the same length by another name.
    found += [fingerprint(top=top) for top in more]
    assert len(set(found)) == 12


def test_fingerprints_stay_the_same_between_versions(settings, folder):
    """A run that goes on is refused when its text has another one."""
    root = folder({"1.txt": b"abcdefgh", "2.jsonl": b'{"text": "abc"}\n\n{"text": "defg"}\n'})
    windows, _ = text.open_text(settings(dataset_path=root), split="train")
    assert windows.fingerprint() == "8766f845ccc56041"


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
