"""A mixture of sources: shares, the order contract of each source, resuming, what is refused."""

import collections
import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
from data.shards_on_disk import open_dataset
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from maxdiloco.data import mixture, order, pipeline
from maxdiloco.data.mixture import Mixture
from maxdiloco.data.order import Interleave, Position

SIZES = {"a": 40, "b": 13, "c": 7}


@dataclasses.dataclass(frozen=True)
class NumberedWindows:
    """Window i of a source has the tokens (its letter, i); the last third of each is padding."""

    source: int
    num_windows: int
    length: int = 3
    padded: bool = True
    requests: int = 0
    documents, summary = property(lambda self: self), str  # "" for the line on the text

    def read(self, windows_N):
        source_N = np.full_like(windows_N, self.source)
        tokens_NL = np.stack([source_N, windows_N, np.zeros_like(windows_N)], axis=1)
        return tokens_NL.astype(np.int32), np.sign(tokens_NL + [[1, 1, 0]]).astype(np.int32)

    def num_tokens(self, windows_N):
        return np.full(len(windows_N), 2)

    def contents(self):
        return f"{self.source}-{self.num_windows}"


def mixed(shares, sizes=None, seed=5):
    """A mixture of sources a, b, c; shares by name, empty: replicas with sources of their own."""
    sizes = sizes or SIZES
    sources = [
        pipeline.Dataset(NumberedWindows("abc".index(name), size), order.seed_of(name, seed), name)
        for name, size in sizes.items()
    ]
    return Mixture(tuple(sizes), tuple(sources), shares, seed)


def windows_read(data, position, step):
    """(source, window) of every row of a step, by replica."""
    rows = np.ix_(range(position.M), range(position.B))
    tokens = data.read(position, step, *rows)["tokens"]
    return [[tuple(row[:2].tolist()) for row in replica] for replica in tokens]


some_shares = st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)).map(
    lambda given: {name: given.get(name, 1) for name in "abc"}
)
orders = st.permutations("abc")
leg = st.tuples(st.integers(3, 5), st.integers(1, 3), st.integers(0, 4), some_shares, orders)


@hypothesis_settings(max_examples=60, deadline=None)
@given(legs=st.lists(leg, min_size=1, max_size=4), per_replica=st.booleans())
def test_each_sequence_of_a_source_is_read_once_in_its_epoch(legs, per_replica):
    """Over a run that stops and continues with other M, B, weights and order of its sources. Each
    start knows only what a checkpoint keeps."""
    position, step, read = None, 1, collections.defaultdict(list)
    for M, B, steps, shares, names in legs:
        data = mixed({} if per_replica else shares, {name: SIZES[name] for name in names})
        if position is None:
            position = data.first_position(M, B)
        else:
            kept = json.loads(json.dumps(position.to_dict(), sort_keys=True))
            position = data.next_position(Position(**kept), step, M, B)
        for _ in range(steps):
            for source, window in sum(windows_read(data, position, step), []):
                read[source].append(window)
            counted = data.metrics(position, step)
            for source, name in enumerate("abc"):
                assert counted[f"data/tokens_{name}"] == 3 * len(read[source])
            step += 1
    for source, windows in read.items():
        size = list(SIZES.values())[source]
        # Steps interleave replicas, so a step may finish an epoch in another order: compare sets.
        counts = collections.Counter(windows)
        epochs, rest = divmod(len(windows), size)
        assert sorted(counts[window] for window in range(size)) == (
            [epochs] * (size - rest) + [epochs + 1] * rest
        )


def test_rows_split_over_processes_are_those_of_one():
    data = mixed({"a": 2, "b": 1, "c": 1})
    position = data.first_position(2, 4)
    whole, left, right = (
        data.read(position, 3, *np.ix_(range(2), rows))["tokens"]
        for rows in (range(4), range(2), range(2, 4))
    )
    assert np.array_equal(np.concatenate([left, right], axis=1), whole)


def test_with_changed_weights_every_source_resumes_where_it_was():
    """By hand: 8 sequences at 2:1:1 read 4, 2 and 2; then 4 at 0:1:1 read none, 2 and 2 more."""
    first, then = mixed({"a": 2, "b": 1, "c": 1}), mixed({"a": 0, "b": 1, "c": 1})
    position = first.first_position(2, 2)
    position = then.next_position(position, 3, 2, 2)
    assert position.sources == order.SourcesRead(
        begun=8, read={"a": 4, "b": 2, "c": 2}, shares={"a": 0, "b": 1, "c": 1}, order=[*"abc"]
    )
    assert (position.base, position.s0) == (8, 3)
    source, number = then.places(position, 3, *np.ix_(range(2), range(2)))
    assert sorted(zip(source.flat, number.flat, strict=True)) == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert then.metrics(position, 3)["data/tokens_c"] == 4 * 3


def test_replica_m_reads_source_m_mod_k_or_all_with_shares():
    """Five replicas, three sources: 0 and 3 share the first, 1 and 4 the second. Two replicas of
    one row: the order of sources is a, b, a, b, but rows are drawn."""
    data = mixed({})
    position = data.first_position(5, 2)
    for step in range(1, 4):
        sources = [{source for source, _ in rows} for rows in windows_read(data, position, step)]
        assert sources == [{0}, {1}, {2}, {0}, {1}]
    assert all(f"replicas {k}, {k + 3}," in " ".join(data.summary(position)) for k in range(3))
    data = mixed({"a": 1, "b": 1}, sizes={"a": 40, "b": 13})
    position = data.first_position(2, 1)
    seen = [windows_read(data, position, step)[0][0][0] for step in range(1, 41)]
    assert 8 < sum(seen) < 32


@pytest.mark.parametrize("shares", [{"a": 6, "b": 3, "c": 1}, {"a": 1, "b": 0, "c": 0}, {}])
def test_an_epoch_ends_before_any_sequence_would_be_read_again(shares):
    """steps=all: all steps up to the last are without a repeat, one more is not."""
    data = mixed(shares)
    position = data.first_position(3, 1)
    last = data.last_step_of_epoch(position)
    rows = [sum(windows_read(data, position, step), []) for step in range(1, last + 2)]
    assert len(set(sum(rows[:-1], []))) == 3 * last
    assert len(set(sum(rows, []))) < 3 * (last + 1)
    resumed = data.next_position(position, 3, 4, 1)
    assert data.last_step_of_epoch(resumed) <= last


def test_metrics_count_tokens_of_each_source_and_the_padding(settings, folder):
    """Step 2 of 4 sequences at 2:1:1 in windows of 3, of which one token is padding."""
    data = mixed({"a": 2, "b": 1, "c": 1})
    found = data.metrics(data.first_position(2, 2), 2)
    assert (found.pop("data/padding"), found.pop("learning/tokens")) == (pytest.approx(1 / 3), 24)
    for source, tokens in {"a": 12.0, "b": 6.0, "c": 6.0}.items():
        assert found.pop(f"data/tokens_{source}") == tokens
    assert found.pop("data/epoch_c") == 2 / 7  # 7 sequences, one of them read in each step
    assert set(found) == {"data/epoch_a", "data/epoch_b"}
    # Of one source, in best fit: two documents of 3 tokens in windows of 4 are a quarter padding.
    root = folder({"1.txt": b"ab", "2.txt": b"cd"})
    cfg = settings(dataset_path=root, eval_dataset_path=root, grain_packing_type="best_fit")
    data = open_dataset(cfg, split="train")
    found = data.metrics(data.first_position(1, 2), 1)
    assert found == {"learning/tokens": 8, "data/padding": 0.25, "data/epoch": 1}
    _, line = data.summary(data.first_position(1, 2))
    assert f"dataset_path={root}: 2 " in line and "25.00%" in line


def test_contents_depend_on_the_sources_and_not_on_the_weights():
    data = mixed({"a": 2, "b": 1, "c": 1})
    assert mixed({"a": 1, "b": 1, "c": 5}).contents == data.contents
    other = mixed({"a": 2, "b": 1, "c": 1}, sizes=SIZES | {"b": 12}).contents
    assert mixture.changed_sources(data.contents, other) == ["b"]
    assert mixture.changed_sources("8766f845ccc56041", "synthetic-1") == []


def test_sources_of_a_config_are_opened_in_order_of_their_names(settings, folder):
    """The held-out part is that of each source: one window of 25 and one of 30."""
    root = folder({f"a/{i}.txt": b"a" * 39 for i in range(3)})
    folder({f"b/{i}.txt": b"b" * 19 for i in range(5)})
    entries = ({"path": f"{root}/b", "weight": "1", "name": "b"},)
    entries += ({"path": f"{root}/a", "weight": "3", "name": "a"},)
    cfg = settings(dataset_mixture=entries)
    data = open_dataset(cfg, split="train")
    assert (data.names, data.shares) == (("a", "b"), {"a": 3, "b": 1})
    assert [source.num_windows for source in data.sources] == [29, 24]
    assert len({source.seed for source in data.sources}) == 2
    held_out = open_dataset(cfg, split="eval")
    tokens = held_out.read_indices(np.arange(held_out.num_windows))["tokens"]
    assert sorted(set(tokens.flat)) == [ord("a"), ord("b")] and len(tokens) == 2
    own = settings(dataset_mixture=entries, eval_dataset_path=f"{root}/b")
    assert open_dataset(own, split="eval").name.startswith("eval_dataset_path=")


def test_the_order_of_two_and_of_three_sources_by_hand():
    """Shares 3 and 1: deadlines of source 0 are after 2, 3 and 4 places, of source 1 after 4. The
    last two are a tie, which source 0 wins. One that is no whole place is rounded up: of shares 1,
    2 and 5 of 8, number 1 of the last is due after 16/5, so after 4 places, as number 0 of the
    second is, which comes first. A run that resumes reads on in this order."""
    sources, numbers = Interleave((3, 1)).at(np.arange(9))
    assert sources.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert numbers.tolist() == [0, 1, 2, 0, 3, 4, 5, 1, 6]
    sources, _ = Interleave((1, 2, 5)).at(np.arange(8))
    assert sources.tolist() == [2, 1, 2, 2, 2, 0, 1, 2]


@given(shares=st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any))
def test_a_source_is_never_a_whole_sequence_from_its_share(shares):
    by_share, total = Interleave(shares), sum(shares)
    counts = np.zeros(len(shares), np.int64)
    sources, numbers = by_share.at(np.arange(2 * total + 3))
    for n, (source, number) in enumerate(zip(sources, numbers, strict=True)):
        assert number == counts[source]
        assert np.array_equal(by_share.before(n), counts)
        assert by_share.index_of(source, int(number)) == n
        counts[source] += 1
        off = counts * total - (n + 1) * np.array(shares)
        assert np.all(np.abs(off) < total)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_shares_of_token_counts_are_within_the_rounding(weights):
    """Of 100,000 parts; what is not 0 stays above it. 0.7, 0.2 and 0.1 are 7, 2 and 1 of 10."""
    assert order.shares([Fraction(text) for text in ("0.7", "0.2", "0.1")]) == (7, 2, 1)
    assert order.shares([Fraction(3), Fraction(0), Fraction("1.5")]) == (2, 0, 1)
    found = order.shares([Fraction(weight) for weight in weights])
    most = order.LONGEST_PERIOD + len(weights)
    assert sum(found) <= most
    for share, weight in zip(found, weights, strict=True):
        assert (share > 0) == (weight > 0)
        exact = weight / sum(weights)
        assert abs(share / sum(found) - exact) <= (len(weights) + 1) / order.LONGEST_PERIOD
