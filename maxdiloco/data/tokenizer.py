"""Open the tokenizer of a run: byte, or a file of the package tokenizers or sentencepiece.

A tokenizer consists of its files: `save` writes them into a folder, and `load` needs nothing else.
The packages, extra [text], are imported on first use.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maxdiloco import json_text, small_files
from maxdiloco.data import packages, paths
from maxdiloco.data.corpus import replace_read_error
from maxdiloco.data.tokenizer_base import SETTINGS, ByteTokenizer, Tokenizer, to_bytes
from maxdiloco.errors import ConfigError, DataError
from maxdiloco.storage.store import is_local

# The keys of a run that name its tokenizer.
KEYS = ("tokenizer_type", "tokenizer_path", "add_bos", "add_eos")
# {tokenizer_type: name of its file in a folder}, and {tokenizer_type: package that reads the file}.
FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
_PACKAGES = {"huggingface": "tokenizers", "sentencepiece": "sentencepiece"}
# A file next to tokenizer.json, which names the tokens that start and end a document.
CONFIG = "tokenizer_config.json"
# Usual names of these tokens, for folders without that file: Llama 3 and this package, Llama 2, ...
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")
# Fields of SubwordTokenizer in the file SETTINGS: tokens that its files name, and that it adds.
_NAMED = ("named_bos", "named_eos", "ends")
_TOKENS = ("bos", "eos", *_NAMED)
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
MOST_BYTES = 1 << 28  # largest file, which is read as a whole; Gemma 3 has 33 MB
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(?<!\.json)")


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer of a run, by the names of KEYS."""

    dataset_type: str
    tokenizer_type: str
    tokenizer_path: str
    add_bos: bool
    add_eos: bool
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer(Tokenizer):
    """Common part of the tokenizers of both packages."""

    content: bytes = dataclasses.field(repr=False)  # content of the file that FILES names
    bos: int | None
    eos: int | None
    vocab_size: int
    engine: Any = dataclasses.field(
        compare=False, repr=False
    )  # the package's tokenizer, made from `content`
    named_bos: int | None = None  # the tokenizer's token for bos, whether it is added or not
    named_eos: int | None = None
    ends: tuple[int, ...] = ()

    def files(self) -> dict[str, bytes]:
        """Return the file of the package and the file SETTINGS, by name (Tokenizer)."""
        return {FILES[self.kind]: self.content} | super().files()

    def settings(self) -> dict[str, Any]:
        """Return the contents of the file SETTINGS (Tokenizer)."""
        return super().settings() | {name: vars(self)[name] for name in _TOKENS}

    def with_bos_and_eos(
        self, bos: int | None, eos: int | None, ends: Sequence[int] | None = None
    ) -> "SubwordTokenizer":
        """Return a copy with other tokens for bos and eos, which adds both to each document.

        Args:
          bos: the token that starts a document, or None.
          eos: the token that ends a document, or None.
          ends: the tokens at which generation stops. None: `eos`.
        """
        ends = ([] if eos is None else [eos]) if ends is None else ends
        named = {"bos": bos, "eos": eos, "named_bos": bos, "named_eos": eos}
        return dataclasses.replace(self, **named, ends=tuple(ends))

    def with_added_tokens(self, *, bos: bool, eos: bool, where: str) -> "SubwordTokenizer":
        """Return a copy that adds its bos and its eos to each document as requested.

        If it adds a bos and no eos, the bos separates documents, so generation also stops at bos.

        Args:
          bos: the value of add_bos.
          eos: the value of add_eos.
          where: the key and value that name the tokenizer, for messages.

        Raises:
          ConfigError: the tokenizer has no such token.
        """
        added = {}
        for name, wanted in (("bos", bos), ("eos", eos)):
            added[name] = vars(self)[f"named_{name}"] if wanted else None
            if wanted and added[name] is None:
                raise ConfigError(
                    f"add_{name}=true, but {where} has no {name.upper()} token. Set "
                    f"add_{name}=false, or name the {name}_token in a {CONFIG} next to "
                    f"{FILES['huggingface']}."
                )
        separates = bos and not eos and added["bos"] not in self.ends
        ends = (*self.ends, added["bos"]) if separates else self.ends
        return dataclasses.replace(self, **added, ends=ends)

    def __reduce__(self):
        """Pickle the content, since a pickled engine would encode text as special tokens."""
        tokens = {name: vars(self)[name] for name in _TOKENS}
        return _with_tokens, (self.kind, self.content, "a pickle", tokens)


class HuggingFaceTokenizer(SubwordTokenizer):
    """A tokenizer.json.

    Decoding returns every text exactly if it is a byte-level BPE without a normalizer. Others may
    change spaces, accents or case.
    """

    kind = "huggingface"

    def added_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the post-processor of the file adds before and after a text."""
        module = package(self.kind)
        probe = module.Tokenizer(module.models.WordLevel({"a": 0}, unk_token="a"))
        if (processor := self.engine.post_processor) is not None:
            probe.post_processor = processor
        encoded = probe.encode("a")
        of_text = [i for i, number in enumerate(encoded.sequence_ids) if number is not None]
        return encoded.ids[: of_text[0]], encoded.ids[of_text[-1] + 1 :]

    def special_tokens(self, names: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Return the tokens that start and end a document, each None if the tokenizer has none.

        If the post-processor puts a token directly before a text, this token starts a document.
        Otherwise the fields of CONFIG name the tokens; null means no token. For a field that CONFIG
        lacks, the usual names are tried.

        Args:
          names: the fields of CONFIG.
        """
        bos_and_eos = []
        for key, usual in (("bos_token", BOS_NAMES), ("eos_token", EOS_NAMES)):
            name = names.get(key)
            if isinstance(name, dict):
                name = name.get("content")
            candidates = usual if key not in names else (name,) if isinstance(name, str) else ()
            tokens = map(self.engine.token_to_id, candidates)
            bos_and_eos.append(next((token for token in tokens if token is not None), None))
        bos, eos = bos_and_eos
        before, _ = self.added_tokens()
        return next(reversed(before), bos), eos

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without threads (Tokenizer)."""
        return self.engine.encode(to_bytes(text).decode(), add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the tokens of texts (Tokenizer)."""
        texts = [to_bytes(text).decode() for text in texts]
        found = self.engine.encode_batch_fast(texts, add_special_tokens=False)
        return (each.ids for each in found)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens (Tokenizer)."""
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        return self.engine.decode(known, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """Return the bytes of each token (Tokenizer)."""
        model = json_text.parse(self.engine.to_str())
        byte_level = "ByteLevel" in json.dumps(model["decoder"])  # then a character is a byte
        added = self.engine.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for text, token in self.engine.get_vocab(with_added_tokens=True).items():
            if token in added:
                bytes_V[token] = 0 if added[token].special else len(added[token].content.encode())
            else:
                bytes_V[token] = len(text) if byte_level else _piece_bytes(text)
        return bytes_V


class SentencePieceTokenizer(SubwordTokenizer):
    """A tokenizer.model.

    Decoding returns every text exactly if it was trained with byte_fallback, without a
    normalization rule and with unchanged spaces. Only U+2581 becomes a space.
    """

    kind = "sentencepiece"

    def special_tokens(self, names: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Return the tokens that start and end a document, which the model names."""
        bos, eos = self.engine.bos_id(), self.engine.eos_id()
        return bos if bos >= 0 else None, eos if eos >= 0 else None

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the tokens of texts (Tokenizer)."""
        return self.engine.encode([to_bytes(text).decode() for text in texts])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens (Tokenizer)."""
        return self.engine.decode([int(token) for token in tokens if 0 <= token < self.vocab_size])

    def token_bytes(self) -> np.ndarray:
        """Return the bytes of each token (Tokenizer)."""
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for token in range(self.vocab_size):
            if not self.engine.is_control(token):
                bytes_V[token] = _piece_bytes(self.engine.id_to_piece(token))
        return bytes_V


def _piece_bytes(piece):
    """Return the bytes of a piece, in which U+2581 stands for a space and <0xE2> for a byte."""
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("\u2581", " ").encode())


def build(values: Mapping[str, Any], rows: int | None = None) -> Tokenizer:
    """Open the tokenizer of a run.

    Args:
      values: {key: value} with at least KEYS.
      rows: rows of the embedding, vocab_size. None: any number of tokens is accepted.

    Raises:
      DataError: tokenizer_path has no such tokenizer, or the tokenizer has more tokens than rows.
      ConfigError: a package, or one of the tokens around a document, is missing.
    """
    kind, path, add_bos, add_eos = (values[key] for key in KEYS)
    found: Tokenizer = ByteTokenizer()
    if kind != found.kind:
        found = read(kind, path).with_added_tokens(
            bos=add_bos, eos=add_eos, where=f"tokenizer_path={path}"
        )
    if rows is not None and found.vocab_size > rows:
        path = "" if kind == "byte" else f" tokenizer_path={path}"
        raise DataError(
            f"vocab_size={rows} is too small for tokenizer_type={kind}{path}: it has "
            f"{found.vocab_size} tokens. Set vocab_size={found.vocab_size} or more."
        )
    return found


def load(folder: pathlib.Path) -> Tokenizer:
    """Load the tokenizer that `save` wrote.

    Raises:
      DataError: the folder has no tokenizer.
      OSError: a file cannot be read.
    """
    try:
        fields = json_text.parse(small_files.read_bytes(folder / SETTINGS))
        kind = fields["tokenizer_type"]
        if kind == ByteTokenizer.kind:
            return ByteTokenizer()
        file = folder / FILES[kind]
        content = small_files.read_bytes(file, MOST_BYTES)
        tokens = {name: fields[name] for name in _TOKENS} | {"ends": tuple(fields["ends"])}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} holds no saved tokenizer: {error}. Give the folder tokenizer of a run or of "
            "a checkpoint."
        ) from error
    return _with_tokens(kind, content, str(file), tokens)


def _with_tokens(
    kind: str, content: bytes, where: str, tokens: Mapping[str, Any]
) -> SubwordTokenizer:
    """Return `from_content`, which has the errors, with the fields _TOKENS."""
    return dataclasses.replace(from_content(kind, content, where), **tokens)


def read(kind: str, path: str) -> SubwordTokenizer:
    """Read a tokenizer, with the tokens that its files name for the start and end of a document.

    Args:
      kind: tokenizer_type.
      path: tokenizer_path. A file, or a folder with the file that FILES names, local or in a
        bucket. Or the https address of a file; or, for huggingface, a name on the hub.

    Raises:
      DataError: there is no such tokenizer.
      ConfigError: a package is missing.
    """
    where = f"tokenizer_path={path}"
    file = os.path.expanduser(path)
    is_name = kind == "huggingface" and _HUB_NAME.fullmatch(path)
    if is_name and not os.path.exists(file):
        file = _downloaded(path, where)
    with replace_read_error(where, f"Give a {FILES[kind]}, or a folder that holds one."):
        if (os.path.isdir if is_local(file) else paths.is_folder)(file):
            file = os.path.join(file, FILES[kind])
        content = paths.read_whole(file, MOST_BYTES)
    found = from_content(kind, content, where)
    config, saved = (_fields_next_to(file, name, kind) for name in (CONFIG, SETTINGS))
    if saved is not None:
        return found.with_bos_and_eos(*(saved.get(name) for name in _NAMED))
    return found.with_bos_and_eos(*found.special_tokens(config or {}))


def _downloaded(name, where):
    """Download tokenizer.json and CONFIG, and return the path of tokenizer.json in the cache."""
    hub, errors = (
        package("huggingface", each) for each in ("huggingface_hub", "huggingface_hub.errors")
    )
    try:
        file = hub.hf_hub_download(name, FILES["huggingface"])
    except (OSError, ValueError, errors.EntryNotFoundError) as error:
        raise DataError(
            f"{where} is not a file or folder, and the hub has no {FILES['huggingface']} by that "
            f"name ({str(error).splitlines()[0].rstrip('.')}). On a machine with a network run `hf "
            f"download {name} --include 'tokenizer*' --local-dir DIR`, then set tokenizer_path=DIR."
        ) from error
    with contextlib.suppress(errors.EntryNotFoundError):
        hub.hf_hub_download(name, CONFIG)
    return file


def _fields_next_to(tokenizer_file, name, kind):
    """Return the fields of a JSON file next to a tokenizer's file.

    Returns:
      {name: value}, or None if there is no such file or the tokenizer's file is not named as in
      FILES.
    """
    folder, own = os.path.split(tokenizer_file)
    if own != FILES[kind]:
        return None
    file = os.path.join(folder, name)
    with replace_read_error(file, "Give this user the right to read it, or remove it."):
        try:
            fields = json_text.parse(paths.read_whole(file, MOST_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{file} is not JSON: {error}. Repair it or remove it.") from error
    return fields if isinstance(fields, dict) else {}


def from_content(kind: str, content: bytes, where: str) -> SubwordTokenizer:
    """Return the tokenizer of a file's content, without bos and eos.

    Args:
      kind: tokenizer_type.
      content: content of the file that FILES names.
      where: the file, for messages.

    Raises:
      DataError: the content is not such a tokenizer.
      ConfigError: the package that reads it is not installed.
    """
    module = package(kind)
    try:
        if kind == "sentencepiece":
            engine = module.SentencePieceProcessor()
            engine.LoadFromSerializedProto(content)
            return SentencePieceTokenizer(content, None, None, engine.vocab_size(), engine)
        engine = module.Tokenizer.from_buffer(content)
    except (ValueError, RuntimeError) as error:
        why = "it does not parse" if kind == "sentencepiece" else error
        raise DataError(
            f"{where} is not a {FILES[kind]} of tokenizer_type={kind}: {why}. Give another file, "
            "or the tokenizer_type that it has."
        ) from error
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    size = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return HuggingFaceTokenizer(content, None, None, size, engine)


def package(kind: str, name: str = "") -> types.ModuleType:
    """Import the package of a tokenizer_type, or another module that it needs.

    Raises:
      ConfigError: the package is not installed.
    """
    user, otherwise = f"tokenizer_type={kind}", ", or use tokenizer_type=byte"
    return packages.require(name or _PACKAGES[kind], user, extra="text", otherwise=otherwise)
