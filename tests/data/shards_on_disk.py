"""Prepared shards of a small source, made in this process, and the data that a config names."""

from maxdiloco.data import registry, shards, tokenizer
from maxdiloco.data.prepared import prepare
from maxdiloco.data.prepared.prepare import Work
from maxdiloco.run import data as run_data
from maxdiloco.run import settings as run_settings
from maxdiloco.run import tokenizer as run_tokenizer

TEXTS = ["abcdefg" * 40, "x", "\u00e4\u00f6\u00fc" * 9, "hello world\n" * 300, "y" * 77]


def open_source(path, kind="text", column="text"):
    """Text that is not yet tokenised."""
    return registry.open_source(registry.Source(kind, str(path), column), "dataset_path")


def texts_of(path, kind="text", limit=1000):
    """What is read of a source in spans of at most `limit` bytes."""
    source = open_source(path, kind)
    return [text for span in source.spans(limit) for text in source.read(span, None)]


def run_prepare(path, out, *, say=lambda line: None, tokens=None, part_bytes=1 << 10, **changed):
    """A preparation, in this process: the parts one after the other."""
    tokens = tokens or tokenizer.ByteTokenizer()
    work = Work(open_source(path), tokens, "source", part_bytes=part_bytes, **changed)
    prepare.prepare(work, str(out), say)


def make(path, out, **changed):
    """Shards of a source."""
    run_prepare(path, out, **changed)
    return shards.open_shards(str(out), "out")


def open_dataset(cfg, split="train", say=lambda line: None):
    """The data of a split, prepared in data_cache_directory, with the tokenizer of the config."""
    tokens, path = run_tokenizer.open_tokenizer(cfg), ""
    if split == "eval":
        path = next(iter(cfg.eval_paths().values()))
        cfg = cfg.model_copy(update={"eval_interval": 1})
    settings = run_settings.read_data(cfg)
    prepared = run_data.prepare_sources(settings, tokens, say, splits=(split,))
    return run_data.open_dataset(settings, tokens, split=split, path=path, prepared=prepared)


def open_text(cfg, split="train"):
    """The windows of a split of a text, and its name."""
    data = open_dataset(cfg, split)
    return data.windows, data.name
