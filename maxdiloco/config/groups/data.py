"""Keys of the data and the tokenizer."""

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, WithJsonSchema

from maxdiloco.config import checks
from maxdiloco.config.fields import DIFFER, FREE, PATHS, Group, Table, key
from maxdiloco.config.values import LIST, NESTED, TABLE, Natural, Seed, TextPath, Words, matching

BYTE_TOKENS = 257  # of the byte tokenizer: the bytes, and the start of a document
TokenizerPath = Annotated[
    str,
    matching(
        r"(gs|s3|az)://[A-Za-z0-9].*|https://[A-Za-z0-9][^?#]*|(?![A-Za-z][A-Za-z0-9+.-]*://).*",
        "a folder, gs://, s3:// or az://bucket/folder, or https://host/tokenizer.json without ?",
    ),
]
# Kept as text, so that shares are exact fractions.
Weight = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?$"),
    WithJsonSchema({"type": ["number", "string"], "minimum": 0}),
    Words("a number >= 0"),
]


class Source(Table):
    """Entries of a source of dataset_mixture."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = key()
    """Name of the source in metrics and checkpoints."""
    path: Annotated[TextPath, StringConstraints(min_length=1)] = key()
    """The text, as dataset_path."""
    weight: Weight = key("1")
    """Share of the sequences, relative to the other sources."""
    dataset_type: Literal["", "text", "parquet", "hf", "arrayrecord"] = key("")
    """Kind of its data. Empty: the dataset_type of the run."""
    text_column: str = key("")
    """Field or column of its text. Empty: the text_column of the run."""


class Data(Group, group="data"):
    """Training text."""

    dataset_type: Literal["text", "parquet", "hf", "arrayrecord", "synthetic"] = key(
        "text", start_here=True
    )
    """Kind of data, for a folder of maxdiloco.prepare any of them. arrayrecord: records of
    tf.train.Example. synthetic: a Markov chain (0.91 nats)."""
    dataset_path: TextPath = key("", resume=FREE, hosts=PATHS, start_here=True)
    """Text: folder (.txt .md .py .jsonl .jsonl.gz .jsonl.zst), file, glob or hub name; also on
    gs://, s3://, az:// or a file on https://. Empty: Python's standard library."""
    dataset_mixture: Annotated[tuple[Annotated[Source, TABLE], ...], LIST, NESTED] = key(
        (), resume=FREE, hosts=PATHS
    )
    """Sources instead of dataset_path: [{path: a, weight: 0.7, name: web}, ...]. A source may have
    dataset_type and text_column too."""
    dataset_per_replica: bool = key(False)
    """Replica m reads only source m mod K of the K sources, for studies of non-iid data."""
    text_column: str = key("text", resume=FREE)
    """Field of a .jsonl line, or column of a table, that has the text."""
    data_cache_directory: str = key("", resume=FREE, hosts=DIFFER)
    """Folder for prepared text, also on gs://, s3:// or az://. The first start tokenises the text
    into it. Empty: the folder prepared of base_output_directory."""
    max_corrupted_records: Natural = key(0, unit="records", resume=FREE)
    """Damaged records of a source that are skipped; each is logged."""
    data_shuffle_seed: Seed = key(0)
    """Random seed of the order of the sequences, and of synthetic data."""
    enable_data_shuffling: bool = key(True)
    """Shuffle the sequences, in each epoch again. false: the order of the files."""
    packing: bool = key(True)
    """Join documents in a sequence; they do not attend to each other. false: pad each document."""
    grain_packing_type: Literal["concat_then_split", "best_fit"] = key("concat_then_split")
    """Cut the joined documents, or cut only those longer than a sequence (arXiv 2404.10830)."""
    grain_worker_count: Natural = key(0, unit="processes", resume=FREE, hosts=DIFFER)
    """Processes that read text. 0: a thread of the trainer."""

    def _check(self: Any) -> None:
        synthetic = self.dataset_type == "synthetic"
        if synthetic:
            checks.require(self, "dataset_mixture", ((),), "dataset_type", "it reads no text")
            checks.expect(self, self.steps != "all", "steps", "a number", "dataset_type")
        if self.dataset_mixture:
            checks.require(self, "dataset_path", ("",), "dataset_mixture", "it names every source")
        else:
            given = self.dataset_path or self.dataset_type in ("synthetic", "text")
            checks.expect(self, given, "dataset_path", "a path", "dataset_type")
        names = [source["name"] for source in self.dataset_mixture]
        weights = [Fraction(source.get("weight", "1")) for source in self.dataset_mixture]
        equal = len(set(weights)) <= 1
        for met, what, because in (
            (len(set(names)) == len(names), "a name of its own for each source", ""),
            (any(weights) or not weights, "a weight above 0", ""),
            (equal or not self.dataset_per_replica, "equal weights", "dataset_per_replica"),
        ):
            checks.expect(self, met, "dataset_mixture", what, because)


class Tokenizer(Group, group="data"):
    """Tokenizer."""

    tokenizer_type: Literal["byte", "sentencepiece", "huggingface"] = key("byte", start_here=True)
    """Kind of tokenizer. byte: UTF-8 bytes, and a token that starts a document."""
    tokenizer_path: TokenizerPath = key("", resume=FREE, hosts=PATHS, start_here=True)
    """Its file or folder, also on gs://, s3://, az:// or https://, or a name on the hub."""
    add_bos: bool = key(True)
    """Put the BOS token before each document; byte always does."""
    add_eos: bool = key(True)
    """Append the EOS token to each document; byte has none."""

    def _check(self: Any) -> None:
        if self.tokenizer_type != "byte":
            checks.expect(self, self.tokenizer_path, "tokenizer_path", "a path", "tokenizer_type")
        reads_bytes = self.tokenizer_type == "byte" and self.dataset_type == "text"
        if reads_bytes and self.vocab_size != "auto":
            fits = self.vocab_size >= BYTE_TOKENS
            checks.expect(self, fits, "vocab_size", f"at least {BYTE_TOKENS}", "tokenizer_type")
