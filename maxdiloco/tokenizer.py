"""A tokenizer for your text: `python -m maxdiloco.tokenizer SOURCE out=tok.json vocab_size=32000`.

Trains a byte-level BPE, which gives back every text exactly. Train with it:
`tokenizer_type=huggingface tokenizer_path=tok.json`.
"""

import codecs
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxdiloco.command_line import HELP, end_with, guarded
from maxdiloco.data import corpus, subword
from maxdiloco.data.corpus import Documents
from maxdiloco.errors import ConfigError
from maxdiloco.processes.output import say

# The first two tokens; data.subword knows them by these names.
SPECIAL_TOKENS = [subword.BOS_NAMES[0], subword.EOS_NAMES[0]]
LEAST = 256 + 2  # tokens: every byte is one, and the special ones
# Bytes of text that are handed over at once; the package holds 256 such pieces. Our choice.
PIECE = 1 << 16


class Options(NamedTuple):
    """The options that may follow SOURCE as key=value, with their defaults."""

    out: str = ""
    vocab_size: int = 32000
    text_column: str = "text"


MEANING = {
    "out": "file to write, in the format of Hugging Face's tokenizer.json",
    "vocab_size": "number of tokens; with little text there are fewer",
    "text_column": "field of a .jsonl line that holds the text",
}


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program; returns its exit code."""
    if not argv or argv[0] in HELP:
        say(
            "usage: python -m maxdiloco.tokenizer SOURCE out=tok.json [key=value ...]\n\n"
            "SOURCE: text as for dataset_path: a folder, a file or a glob\n"
        )
        for name, default in Options()._asdict().items():
            say(f"  {name}={default!r}  {MEANING[name]}")
        return 0
    options = parse(argv[1:])
    package = subword.package("huggingface")
    documents = corpus.read_table(corpus.find_files(argv[0], "SOURCE"), column=options.text_column)
    content = train(package, documents, options.vocab_size).to_str().encode()
    _write(options.out, content)
    tokens = subword.of_content("huggingface", content, options.out, None, None).vocab_size
    say(
        f"{options.out}: {tokens:,} tokens from {len(documents):,} documents, "
        f"{documents.size.sum() / 1e6:,.1f} MB. Train with tokenizer_type=huggingface "
        f"tokenizer_path={options.out}"
    )
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Options from key=value. Raises ConfigError for what cannot work."""
    given = {}
    for argument in arguments:
        name, equals, raw = argument.partition("=")
        if not equals or name not in MEANING or name in given:
            raise ConfigError(
                f"{argument} is no option of tokenizer, or is given twice. Use key=value, once "
                f"each, with {', '.join(MEANING)}."
            )
        given[name] = raw
    size = given.pop("vocab_size", str(Options().vocab_size))
    if not size.isdecimal() or not LEAST <= int(size) < 2**31:
        raise ConfigError(
            f"vocab_size={size} is no number of tokens. Use {LEAST} or more: 256 bytes, a start "
            "and an end of a document, and what is learnt."
        )
    options = Options(**given, vocab_size=int(size))
    if not options.out:
        raise ConfigError("out is empty: it says which file to write. Set out=tok.json.")
    if os.path.exists(options.out):
        raise ConfigError(
            f"out={options.out} exists already, and runs may use it. Give another name, or remove "
            "it."
        )
    if not os.path.isdir(os.path.dirname(options.out) or os.curdir):
        raise ConfigError(f"out={options.out}: its folder does not exist. Make it first.")
    return options


def train(package: types.ModuleType, documents: Documents, vocab_size: int):
    """A byte-level BPE of documents. package: tokenizers.

    The text is read piece by piece; in memory are its distinct words. The same documents give the
    same tokenizer.
    """
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=byte_level.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    count = int((-(-documents.size // PIECE)).sum())
    tokenizer.train_from_iterator(texts(documents), trainer, length=count)
    return tokenizer


def texts(documents: Documents) -> Iterator[str]:
    """The text of documents in pieces of at most PIECE bytes, cut between characters.

    Bytes that are not UTF-8 become U+FFFD.
    """
    for document, size in enumerate(documents.size.tolist()):
        cuts = [*range(0, size, PIECE), size]
        pieces = [(document, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for (_, _, end), data in zip(pieces, corpus.read_pieces(documents, pieces), strict=True):
            yield decoder.decode(data.tobytes(), final=end == size)


def _write(out: str, content: bytes) -> None:
    """Write a file that is whole or absent. Raises ConfigError where that fails."""
    unfinished = f"{out}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, out)
    except OSError as error:
        raise ConfigError(
            f"out={out} cannot be written ({error.strerror}). Choose a folder that can be written "
            "and has free space."
        ) from error


def cli() -> None:
    """The console entry `maxdiloco-tokenizer`."""
    end_with(main)


if __name__ == "__main__":
    cli()
