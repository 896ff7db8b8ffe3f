"""Windows of a text: how documents fill them, which are held out, and what tells texts apart."""

import zlib

import numpy as np
import pytest
from data.shards_on_disk import open_dataset, open_text
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from maxdiloco.data import packing

START = 256  # the token that starts a document


@pytest.mark.parametrize(
    ("texts", "keys", "tokens", "segments"),
    [
        # f is too short and not read
        ("abc de f", {}, "<abc <de<", "1111 1112"),
        # a document continues in the next window, as segment 1
        ("abc de f", {"max_target_length": 3}, "<ab c<d e<f", "111 122 122"),
        # each begins a window and is padded with segment 0
        ("abc de abcdef", {"packing": False}, "<abc <de_ <abc def_", "1111 1110 1111 1110"),
        # abcdef alone is cut; <a fits beside nothing
        ("abc de abcdef a", {"grain_packing_type": "best_fit"},
         "<abc <de_ <abc def_ <a__", "1111 1110 1111 1110 1100"),
        # <bcd and one of <a, <e, <f; the other two together
        ("a bcd e f", {"grain_packing_type": "best_fit", "max_target_length": 6},
         "<a<e__ <bcd<f", "112200 111122"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_windows_and_segments_by_hand(settings, folder, kind, texts, keys, tokens, segments):
    """Documents are files, or lines of one file; the windows have 4 tokens unless keys say. < is
    the start of a document, _ padding."""
    texts = [each.encode() for each in texts.split()]
    if kind == "txt":
        root = folder({f"{number}.txt": content for number, content in enumerate(texts)})
    else:
        root = folder({"1.jsonl": b"".join(b'{"text": "%s"}\n' % content for content in texts)})
    cfg = settings(dataset_path=root, eval_dataset_path=root, **keys)  # nothing is held out
    windows, _ = open_text(cfg)
    found = windows.read(np.arange(windows.num_windows))
    assert found[0].dtype == found[1].dtype == np.int32
    signs = {"<": START, "_": 0}
    tokens = [[signs.get(sign, ord(sign)) for sign in window] for window in tokens.split()]
    assert found[0].tolist() == tokens
    assert found[1].tolist() == [list(map(int, window)) for window in segments.split()]
    assert windows.read(np.array([1, 0, 1]))[0].tolist() == [tokens[i] for i in (1, 0, 1)]


def split(cfg):
    """The windows to train on, and those that are held out."""
    return [open_text(cfg, split=split)[0] for split in ("train", "eval")]


@pytest.mark.parametrize(
    ("count", "fraction", "held"),
    [(41, 0.05, [0, 20, 40]), (16, 0.25, [0, 4, 8, 12]), (16, 0.3, [0, 3, 6, 10, 13])],
)
def test_of_many_equal_files_those_held_out_lie_apart(settings, folder, count, fraction, held):
    root = folder({f"{number:02}.txt": bytes([65 + number]) * 11 for number in range(count)})
    cfg = settings(dataset_path=root, eval_fraction=fraction)
    train, held_out = split(cfg)
    length = 12  # of a file, its start included
    numbers = np.arange(count)
    expected = [number for number in numbers if number not in held]
    for part, files in ((held_out, held), (train, expected)):
        assert part.documents.lengths.tolist() == [length] * len(files)
        tokens = part.read(np.arange(part.num_windows))[0].reshape(-1, length)
        assert tokens[:, 1].tolist() == [65 + number for number in files]


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
    parts = split(cfg)
    assert [part.num_windows for part in parts] == [train, held_out]
    tokens = [part.read(np.arange(part.num_windows))[0] for part in parts]
    assert np.concatenate(tokens).reshape(-1).tolist() == [START, *text_bytes]


@pytest.mark.parametrize(
    ("first", "share", "files"),
    [(6460, 0.05, range(20)), (1240, 0.09, [0]), (256, 0.05, range(20))],
)
def test_files_of_unequal_size_are_not_held_out_whole(settings, folder, first, share, files):
    """File 0 of 20 has 34 % of the bytes: the last 5 % of the windows are held out in its place.
    With 9 % of them in file 0 the file is held out, and with 2 % not."""
    root = folder({f"{i:02}.txt": bytes([97 + i]) * (660 if i else first) for i in range(20)})
    parts = split(settings(dataset_path=root))
    counts = [part.num_windows for part in parts]
    assert round(counts[1] / sum(counts), 3) == share
    lengths = [661 if number else first + 1 for number in files]
    assert parts[1].documents.lengths.tolist() == lengths


def test_without_a_held_out_part_all_of_the_text_is_trained_on(settings, folder):
    root = folder({"train/1.txt": b"abcdefg", "held/2.txt": b"fedcbag"})
    cfg = settings(dataset_path=f"{root}/train", eval_dataset_path=f"{root}/held")
    for split, key, file in (("train", "", "train/1.txt"), ("eval", "eval_", "held/2.txt")):
        windows, name = open_text(cfg, split)
        assert (windows.num_windows, name) == (2, f"{key}dataset_path={root}/{file[:-6]}")
        (tokens, _) = windows.read(np.arange(2))
        expected = b"abcdefg" if split == "train" else b"fedcbag"
        assert tokens.reshape(-1).tolist() == [START, *expected]
    cfg = settings(dataset_path=root, eval_fraction=0.0)
    assert open_text(cfg)[0].num_windows == 4


def test_contents_differ_when_the_windows_do(settings, folder):
    """Another length, split, packing or a file more; the names of folders and files do not count"""
    eights = {f"{i}.txt": b"abcdefgh" for i in range(3)}
    root = folder({f"{top}/{name}": data for top in "1234" for name, data in eights.items()})
    folder({"3/3.txt": b"ab", "4/3.txt": b"abc"})

    def contents(split="train", top="1", **changed):
        cfg = settings(**{"dataset_path": f"{root}/{top}"} | changed)
        return open_text(cfg, split=split)[0].contents()

    assert contents() == contents(top="2")
    found = [contents(), contents("eval"), contents(packing=False)]
    # 27 tokens are two windows of 12 or 13, one of them for eval.
    found += [contents(max_target_length=length) for length in (5, 12, 13)]
    found.append(contents("eval", max_target_length=12))
    # 27 tokens in windows of 9 are three documents whatever the packing.
    nines = [contents(max_target_length=9, packing=packing) for packing in (True, False)]
    assert nines[0] == nines[1]
    found += [nines[0], contents(max_target_length=9, grain_packing_type="best_fit")]
    # 27 tokens and 3 or 4 more are 7 windows either way.
    found += [contents(top=top) for top in "34"]
    assert len(set(found)) == 11
    # It stays the same between versions: a run is refused when its text has another one.
    folder({"6/1.txt": b"abcdefgh", "6/2.jsonl": b'{"text": "abc"}\n\n{"text": "defg"}\n'})
    assert contents(top="6") == "86d88e0355b5408c"


def test_the_same_text_elsewhere_has_the_same_contents(settings, folder):
    """Also where it is a line of a .jsonl file. One token that differs is enough."""
    text = b"abcdefgh" * 9
    files = {"here/1.txt": text, "there/deep/2.txt": text, "other/1.txt": text[:-1] + b"i"}
    root = folder(files | {"lines/1.jsonl": b'{"text": "%s"}\n' % text})
    here, there, lines, other = (
        open_dataset(settings(dataset_path=f"{root}/{name}")).contents
        for name in ("here", "there", "lines", "other")
    )
    assert here == there == lines != other


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=60)
lengths = st.integers(2, 12)
KINDS = (packing.CONCATENATED, packing.DOCUMENTS_APART, packing.BEST_FIT)


def layout(documents, length, kind):
    return packing.layout(np.array(documents, np.int64), length, kind)


def read(windows):
    return [windows.pieces(i) for i in range(windows.num_windows)]


def test_best_fit_by_hand():
    """Documents of 3, 9, 1, 2 and 1 tokens, windows of 4. 9 is 4 + 4 + 1. The rest, largest
    first: 3 opens a window, 2 another; of the ones, the last first, one fills the first, one goes
    to the second and the last one, of document 2, fills it. Windows stand in file order.
    """
    windows = layout([3, 9, 1, 2, 1], 4, packing.BEST_FIT)
    assert read(windows) == [
        [(0, 0, 3), (4, 0, 1)],
        [(1, 0, 4)],
        [(1, 4, 8)],
        [(1, 8, 9), (2, 0, 1), (3, 0, 2)],
    ]
    assert windows.num_tokens(np.arange(4)).tolist() == [4, 4, 4, 4]


def naive_best_fit(pieces, length):
    """Room left in every window: each piece, largest first, where it leaves the least room."""
    rooms = []
    for size in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(length - size)
    return sorted(rooms)


@hypothesis_settings(max_examples=200)
@given(pieces=sizes, length=st.integers(30, 70))
def test_pieces_of_one_size_together_are_best_fit_one_by_one(pieces, length):
    """Which of two windows with equal room takes a piece is all that differs."""
    windows, count = packing.best_fit(np.array(pieces, np.int32), length)
    filled = np.bincount(windows, weights=pieces, minlength=count)
    assert sorted(length - filled) == naive_best_fit(pieces, length)


def test_the_choice_between_windows_with_equal_room_is_stable():
    """A resumed run reads on in them: another choice is another text, with the same fingerprint."""
    pieces = (np.arange(300) ** 2 % 59 + 1).astype(np.int32)
    windows, count = packing.best_fit(pieces, 64)
    assert (count, zlib.crc32(windows.astype("<i8").tobytes())) == (129, 407085141)


@given(documents=sizes, length=lengths, kind=st.sampled_from(KINDS))
def test_every_token_is_in_one_window(documents, length, kind):
    """Concatenated documents lose the last tokens, fewer than a window; the others lose none."""
    windows = layout(documents, length, kind)
    stream, seen, filled = np.cumsum([0, *documents]), [], []
    for pieces in read(windows):
        for document, begin, end in pieces:
            assert begin < end
            seen += range(stream[document] + begin, stream[document] + end)
        filled.append(sum(end - begin for _, begin, end in pieces))
        assert filled[-1] <= length
    assert windows.num_tokens(np.arange(len(filled))).tolist() == filled
    kept = stream[-1] // length * length if kind == packing.CONCATENATED else stream[-1]
    assert sorted(seen) == list(range(kept))
