"""A tokenizer for your text: `python -m maxdiloco.tokenizer SOURCE out=tok.json vocab_size=32000`.

It is a byte-level BPE, which gives back every text exactly.
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

SOURCE: text as for dataset_path: a folder, file or glob, or a name of the hub
"""
# The first two tokens; data.tokenizer knows them by these names.
SPECIAL_TOKENS = [tokenizers.BOS_NAMES[0], tokenizers.EOS_NAMES[0]]
LEAST = 256 + 2  # tokens: every byte is one, and the special ones
MOST = 1 << 24  # the package makes room for all of them at once; our choice
# Characters of text that are handed over at once; the package holds 256 such pieces. Our choice.
PIECE = 1 << 16
_SPAN = 64 << 20  # bytes that are read as one; of a hub's data the rows of that many


OPTIONS = MappingProxyType({
    "out": Option(
        "",
        "file to write, in the format of Hugging Face's tokenizer.json, also in a bucket: gs://, "
        "s3://, az://",
    ),
    "vocab_size": Option(
        32000,
        "number of tokens: 256 bytes, a start and an end of a document, and what is learnt; "
        "with little text there are fewer",
        int,
        LEAST,
        MOST,
    ),
    "dataset_type": Option("text", "what SOURCE is, as in training: text, parquet or hf"),
    "text_column": Option(
        "text", "field of a .jsonl line, or column of a table, that holds the text"
    ),
    "max_corrupted_records": Option(0, "damaged records that are skipped", int, 0),
})  # fmt: skip


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(OPTIONS)]))
        return 0
    path = argv[0]
    options, _ = read_options(argv[1:], OPTIONS, "tokenizer")
    if not options.out:
        raise ConfigError("out is empty: it says which file to write. Set out=tok.json.")
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
    tokens = tokenizers.of_content("huggingface", content, options.out).vocab_size
    say(
        f"{options.out}: {tokens:,} tokens from {count['documents']:,} documents, "
        f"{count['bytes'] / 1e6:,.1f} MB. Train with tokenizer_type=huggingface "
        f"tokenizer_path={options.out}"
    )
    return 0


def _check_place(out: str) -> None:
    """Raise ConfigError where a new file cannot be, before the text is read."""
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
    """A byte-level BPE of text, a function of its pieces. The text is read piece by piece; in
    memory are its distinct words."""
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
    """The text of a source in pieces of at most PIECE characters. count: gets the documents and
    bytes that were read. allowed: damaged records that are skipped. Raises DataError for text that
    is unreadable and for one damaged record more."""
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
