"""Train a tokenizer on your text: `python -m maxdiloco.tokenizer SOURCE out=tok.json`.

The tokenizer is a byte-level BPE, which decodes every text exactly.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from etils import epath

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.config import checks
from maxdiloco.data import corpus, registry
from maxdiloco.data import tokenizer as tokenizers
from maxdiloco.data.tokenizer_base import to_bytes
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.output import say, shows_bars
from maxdiloco.storage.store import is_local

USAGE = """usage: python -m maxdiloco.tokenizer SOURCE out=tok.json [key=value ...]

SOURCE: text as for dataset_path: a folder, a file, a glob, or a name on the hub

examples:
  python -m maxdiloco.tokenizer /data/text out=tok.json vocab_size=32000
  python -m maxdiloco.tokenizer /data/parquet out=tok.json dataset_type=parquet text_column=body

options:"""
# The first two tokens, with names that data.tokenizer recognises.
SPECIAL_TOKENS = [tokenizers.BOS_NAMES[0], tokenizers.EOS_NAMES[0]]
LEAST = 256 + 2  # smallest number of tokens: all bytes, and the two special tokens
MOST = 1 << 24  # largest number of tokens, since the package reserves memory for all of them
# Characters of a piece of text. The package holds 256 pieces in memory.
PIECE = 1 << 16
_SPAN = 64 << 20  # bytes of a span of the source; for a data set of the hub, rows of that size


OPTIONS = MappingProxyType({
    "out": Option(
        "",
        "file to write, in the format of Hugging Face's tokenizer.json, also in a bucket: gs://, "
        "s3://, az://",
    ),
    "vocab_size": Option(
        32000,
        "number of tokens: 256 bytes, the start and the end of a document, and learnt subwords; "
        "fewer with little text",
        int,
        LEAST,
        MOST,
    ),
    "dataset_type": Option("text", "format of SOURCE, as in training: text, parquet or hf"),
    "text_column": Option(
        "text", "field of a .jsonl line, or column of a table, that holds the text"
    ),
    "max_corrupted_records": Option(0, "number of damaged records to skip", int, 0),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    path = argv[0]
    options, _ = read_options(argv[1:], OPTIONS, "tokenizer")
    if not options.out:
        raise ConfigError("out is empty: expected the file to write. Set out=tok.json.")
    _check_place(options.out)
    source = registry.open_for_user(
        registry.Source(options.dataset_type, path, options.text_column)
    )
    count: Counter[str] = Counter()
    pieces = texts(source, count, allowed=options.max_corrupted_records)
    content = train(pieces, options.vocab_size).to_str().encode()
    if not count["documents"]:
        raise DataError(f"SOURCE={path} holds no text: its documents are empty. Give text to read.")
    from maxdiloco.storage import output_file

    output_file.write_whole("out", options.out, content)
    tokens = tokenizers.from_content("huggingface", content, options.out).vocab_size
    say(
        f"{options.out}: {tokens:,} tokens from {count['documents']:,} documents, "
        f"{count['bytes'] / 1e6:,.1f} MB. Train with tokenizer_type=huggingface "
        f"tokenizer_path={options.out}"
    )
    return 0


def _check_place(out: str) -> None:
    """Raise ConfigError if the new file cannot be written there, before the text is read."""
    from maxdiloco.storage import output_file

    checks.refuse_store("out", out)
    if is_local(out) and not os.path.isdir(os.path.dirname(out) or os.curdir):
        raise ConfigError(f"out={out}: its folder does not exist. Make it first.")
    if not is_local(out):
        output_file.check_path("out", out)
    if epath.Path(out).exists():
        raise ConfigError(
            f"out={out} exists already, and runs may use it. Give another name, or remove it."
        )


def train(pieces: Iterable[str], vocab_size: int):
    """Train a byte-level BPE, which depends only on the pieces and vocab_size.

    The text is read piece by piece. Only its distinct words are kept in memory.
    """
    package = tokenizers.package("huggingface")
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=byte_level.alphabet(),
        show_progress=shows_bars(),
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def texts(source: registry.Reader, count: Counter[str], *, allowed: int = 0) -> Iterator[str]:
    """Yield the text of a source in pieces of at most PIECE characters.

    Args:
      source: the source.
      count: its entries documents and bytes are increased by the amounts read.
      allowed: number of damaged records that are skipped.

    Raises:
      DataError: text is unreadable, or more records than allowed are damaged.
    """
    skip = functools.partial(corpus.skip, [], allowed)
    for span in source.spans(_SPAN):
        for item in source.read(span, skip):
            count["documents"] += item.begins
            for begin in range(0, len(item.text), PIECE):
                # Half of a surrogate pair becomes a question mark, as in every tokenizer.
                data = to_bytes(item.text[begin : begin + PIECE])
                count["bytes"] += len(data)
                yield data.decode()


if __name__ == "__main__":
    main()
