"""Keys of the data and the tokenizer."""

import re
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import StringConstraints, WithJsonSchema

from maxdiloco.config import checks
from maxdiloco.config.fields import APART, DIFFER, FREE, PATHS, Group, Table, key, rule
from maxdiloco.config.values import NESTED, TABLE, Bool, Natural, Seed, Words, show
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


class Data(Group):
    """The training text."""

    group: ClassVar[str] = "data"
    title: ClassVar[str] = "training text"

    dataset_type: Literal["text", "parquet", "hf", "arrayrecord", "synthetic"] = key(
        "text", start_here=True
    )
    """Kind of data, for a folder of maxdiloco.prepare any of them. arrayrecord: records of
    tf.train.Example. synthetic: a Markov chain (0.91 nats)."""
    dataset_path: str = key("", resume=FREE, hosts=PATHS, from_checkpoint=True, start_here=True)
    """Text: folder (.txt .md .py .jsonl .jsonl.gz .jsonl.zst), file, glob or hub name; also on
    gs://, s3://, az:// or a file on https://. Empty: Python's standard library."""
    dataset_mixture: Annotated[tuple[Annotated[Source, TABLE], ...], NESTED] = key(
        (), resume=FREE, hosts=PATHS, from_checkpoint=True
    )
    """Sources in place of dataset_path: [{path: a, weight: 0.7, name: web}, ...]. A source may have
    dataset_type and text_column too."""
    dataset_per_replica: Bool = key(False)
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
    enable_data_shuffling: Bool = key(True)
    """Shuffle the sequences, in each epoch again. false: the order of the files."""
    packing: Bool = key(True)
    """Join documents in a sequence; they do not attend to each other. false: pad each document."""
    grain_packing_type: Literal["concat_then_split", "best_fit"] = key("concat_then_split")
    """Cut the joined documents, or cut only those longer than a sequence (arXiv 2404.10830)."""
    grain_worker_count: Natural = key(0, unit="processes", resume=APART, hosts=DIFFER)
    """Processes that read text. 0: a thread of the trainer."""

    @rule
    def _check_data(self: Any) -> None:
        synthetic = self.dataset_type == "synthetic"
        mixture = show(self.dataset_mixture)
        if synthetic and self.steps == "all":
            raise ConfigError(
                "steps=all is one epoch, but dataset_type=synthetic has no end. Set steps."
            )
        if not self.packing and self.grain_packing_type != "concat_then_split":
            raise ConfigError(
                f"grain_packing_type={self.grain_packing_type} has no effect with packing=false. "
                "Leave it out, or use packing=true."
            )
        if self.dataset_per_replica and not self.dataset_mixture:
            raise ConfigError(
                "dataset_per_replica=true has no effect without dataset_mixture. Name its sources "
                "there, or leave it false."
            )
        if self.dataset_mixture and synthetic:
            raise ConfigError(
                f"dataset_mixture={mixture} needs files, but dataset_type=synthetic has none. "
                "Leave one of them out."
            )
        if self.dataset_mixture and self.dataset_path:
            raise ConfigError(
                f"dataset_path={self.dataset_path} is given in addition to dataset_mixture, which "
                "names every source. Leave one of them out."
            )
        if self.dataset_type not in ("synthetic", "text") and not (
            self.dataset_path or self.dataset_mixture
        ):
            raise ConfigError(
                f"dataset_path is empty, but dataset_type={self.dataset_type} has no data of its "
                "own. Set dataset_path, or use dataset_type=text."
            )
        if not synthetic:
            checks.refuse_text_path("dataset_path", self.dataset_path)

    @rule
    def _check_mixture(self: Any) -> None:
        names = [source["name"] for source in self.dataset_mixture]
        weights = [Fraction(source.get("weight", "1")) for source in self.dataset_mixture]
        for source in self.dataset_mixture:
            name = source["name"]
            checks.refuse_text_path(f"dataset_mixture: path of {name}", source["path"])
            if names.count(name) > 1:
                raise ConfigError(
                    f"dataset_mixture has {names.count(name)} sources named {name}, but "
                    "checkpoints and metrics tell them apart by name. Give each its own."
                )
        if weights and not any(weights):
            raise ConfigError(
                f"dataset_mixture={show(self.dataset_mixture)} has no weight above 0. Give a "
                "source one."
            )
        if self.dataset_per_replica and len(set(weights)) > 1:
            raise ConfigError(
                "dataset_mixture has weights, which have no effect with dataset_per_replica=true: "
                "a replica reads one source. Leave them out."
            )


class Tokenizer(Group):
    """The tokenizer."""

    group: ClassVar[str] = "data"
    heading: ClassVar[str] = "tokenizer"

    tokenizer_type: Literal["byte", "sentencepiece", "huggingface"] = key("byte", start_here=True)
    """Kind of tokenizer. byte: UTF-8 bytes, and a token that starts a document."""
    tokenizer_path: str = key("", resume=FREE, hosts=PATHS, from_checkpoint=True, start_here=True)
    """Its file or folder, also on gs://, s3://, az:// or https://, or a name on the hub."""
    add_bos: Bool = key(True)
    """Put the BOS token before each document; byte always does."""
    add_eos: Bool = key(True)
    """Append the EOS token to each document; byte has none."""

    @rule
    def _check_tokenizer(self: Any) -> None:
        path, kind = self.tokenizer_path, self.tokenizer_type
        if kind == "byte" and path:
            other = "sentencepiece" if path.endswith(".model") else "huggingface"
            raise ConfigError(
                f"tokenizer_path={path} has no effect with tokenizer_type=byte. Set "
                f"tokenizer_type={other}, or leave tokenizer_path out."
            )
        if kind == "byte" and not self.add_bos:
            raise ConfigError(
                "add_bos=false has no effect with tokenizer_type=byte, whose token 256 starts "
                "every document. Leave add_bos out."
            )
        if kind != "byte" and not path:
            raise ConfigError(
                f"tokenizer_path is empty, but tokenizer_type={kind} is read from a file. Set "
                "tokenizer_path, or use tokenizer_type=byte."
            )
        if not re.fullmatch(_TOKENIZER_PATH, path, re.DOTALL):
            raise ConfigError(
                f"tokenizer_path={path} is an address that is not read. Use gs://, s3:// or "
                "az://bucket/folder, https://host/tokenizer.json without a question mark, or a "
                "folder."
            )
        reads_bytes = kind == "byte" and self.dataset_type == "text"
        if reads_bytes and self.vocab_size != "auto" and self.vocab_size < BYTE_TOKENS:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small: tokenizer_type=byte needs "
                f"{BYTE_TOKENS}, 256 bytes and the start of a document. Use "
                f"vocab_size={BYTE_TOKENS} or more."
            )
