"""Keys of the data and the tokenizer."""

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, WithJsonSchema

from maxdiloco.config import checks
from maxdiloco.config.fields import DIFFER, FREE, PATHS, Group, Table, key
from maxdiloco.config.values import LIST, NESTED, TABLE, Natural, Seed, Words, show
from maxdiloco.errors import ConfigError

BYTE_TOKENS = 257  # of the byte tokenizer: the bytes, and the start of a document
_TOKENIZER_PATH = (
    r"(gs|s3|az)://[A-Za-z0-9].*|https://[A-Za-z0-9][^?#]*|(?![A-Za-z][A-Za-z0-9+.-]*://).*"
)
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
    path: Annotated[str, StringConstraints(min_length=1)] = key()
    """The text, as dataset_path."""
    weight: Weight = key("1")
    """Share of the sequences, relative to the other sources."""
    dataset_type: Literal["", "text", "parquet", "hf", "arrayrecord"] = key("")
    """Kind of its data. Empty: the dataset_type of the run."""
    text_column: str = key("")
    """Field or column of its text. Empty: the text_column of the run."""


class Data(Group, group="data", title="training text"):
    """The training text."""

    dataset_type: Literal["text", "parquet", "hf", "arrayrecord", "synthetic"] = key(
        "text", start_here=True
    )
    """Kind of data, for a folder of maxdiloco.prepare any of them. arrayrecord: records of
    tf.train.Example. synthetic: a Markov chain (0.91 nats)."""
    dataset_path: str = key("", resume=FREE, hosts=PATHS, from_checkpoint=True, start_here=True)
    """Text: folder (.txt .md .py .jsonl .jsonl.gz .jsonl.zst), file, glob or hub name; also on
    gs://, s3://, az:// or a file on https://. Empty: Python's standard library."""
    dataset_mixture: Annotated[tuple[Annotated[Source, TABLE], ...], LIST, NESTED] = key(
        (), resume=FREE, hosts=PATHS, from_checkpoint=True
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
            if self.steps == "all":
                raise ConfigError("steps=all requires text, but dataset_type=synthetic. Set steps.")
        if not self.packing:
            checks.require_default(self, "grain_packing_type", "packing")
        if self.dataset_mixture:
            checks.require(self, "dataset_path", ("",), "dataset_mixture", "it names every source")
        else:
            checks.require_default(self, "dataset_per_replica", "dataset_mixture")
            if self.dataset_type not in ("synthetic", "text"):
                checks.require_set(self, "dataset_path", "dataset_type")
        if not synthetic:
            checks.refuse_text_path("dataset_path", self.dataset_path)
        names = [source["name"] for source in self.dataset_mixture]
        weights = [Fraction(source.get("weight", "1")) for source in self.dataset_mixture]
        for source in self.dataset_mixture:
            name = source["name"]
            checks.refuse_text_path(f"dataset_mixture: path of {name}", source["path"])
            if names.count(name) > 1:
                raise ConfigError(
                    f"dataset_mixture has {names.count(name)} sources named {name}. Give each its "
                    "own name, by which checkpoints and metrics refer to it."
                )
        if weights and not any(weights):
            raise ConfigError(
                f"dataset_mixture={show(self.dataset_mixture)}: expected a weight above 0."
            )
        if self.dataset_per_replica and len(set(weights)) > 1:
            raise ConfigError(
                "dataset_mixture: expected equal weights with dataset_per_replica=true, since a "
                "replica reads one source. Leave the weights out."
            )


class Tokenizer(Group, group="data", heading="tokenizer"):
    """The tokenizer."""

    tokenizer_type: Literal["byte", "sentencepiece", "huggingface"] = key("byte", start_here=True)
    """Kind of tokenizer. byte: UTF-8 bytes, and a token that starts a document."""
    tokenizer_path: str = key("", resume=FREE, hosts=PATHS, from_checkpoint=True, start_here=True)
    """Its file or folder, also on gs://, s3://, az:// or https://, or a name on the hub."""
    add_bos: bool = key(True)
    """Put the BOS token before each document; byte always does."""
    add_eos: bool = key(True)
    """Append the EOS token to each document; byte has none."""

    def _check(self: Any) -> None:
        if self.tokenizer_type == "byte":
            checks.require_default(self, "tokenizer_path add_bos", "tokenizer_type")
        else:
            checks.require_set(self, "tokenizer_path", "tokenizer_type")
        if not re.fullmatch(_TOKENIZER_PATH, self.tokenizer_path, re.DOTALL):
            raise ConfigError(
                f"tokenizer_path={self.tokenizer_path}: expected gs://, s3:// or "
                "az://bucket/folder, https://host/tokenizer.json without a question mark, or a "
                "folder."
            )
        reads_bytes = self.tokenizer_type == "byte" and self.dataset_type == "text"
        if reads_bytes and self.vocab_size != "auto" and self.vocab_size < BYTE_TOKENS:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: expected at least {BYTE_TOKENS} with "
                "tokenizer_type=byte, for 256 bytes and the start of a document."
            )
