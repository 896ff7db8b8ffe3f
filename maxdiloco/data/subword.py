"""Tokenizers from files: tokenizer.json of Hugging Face, tokenizer.model of SentencePiece.

The packages tokenizers and sentencepiece, the extra [text], are imported where they are used.
"""

import dataclasses
import importlib
import json
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxdiloco import json_text
from maxdiloco.data import tokenizer_files
from maxdiloco.data.tokenizer_files import SETTINGS, to_bytes
from maxdiloco.errors import ConfigError, DataError

if TYPE_CHECKING:
    from etils import epath  # imported where it is used: benchmarks of a step do without

# tokenizer_type -> the file of such a tokenizer in a folder, and the package that reads it.
FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
_PACKAGES = {"huggingface": "tokenizers", "sentencepiece": "sentencepiece"}
# Beside tokenizer.json: which of its tokens start and end a document.
_CONFIG = "tokenizer_config.json"
# Names of these tokens where no such file says them: Llama 3 and this package, Llama 2, Gemma, ...
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(?<!\.json)")


@dataclasses.dataclass(frozen=True)
class Source:
    """The file of a tokenizer. where: for messages; names: content of _CONFIG, or empty.

    saved: content of SETTINGS beside it, or empty; it says the tokens around a document.
    """

    kind: str
    content: bytes
    where: str
    names: Mapping[str, Any]
    saved: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """What the tokenizers of both packages share; see data.tokenizer.Tokenizer.

    content: of the file that FILES names. engine: the package's object, made of it.
    """

    content: bytes = dataclasses.field(repr=False)
    bos: int | None
    eos: int | None
    vocab_size: int
    engine: Any = dataclasses.field(compare=False, repr=False)

    kind = ""

    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for tokenizers with the same files, bos and eos."""
        return tokenizer_files.fingerprint(self.files())

    def files(self) -> Mapping[str, bytes]:
        """Content of each file that `load` needs, by its name in the folder."""
        saved = tokenizer_files.settings(self.kind, self.bos, self.eos)
        return {FILES[self.kind]: self.content, SETTINGS: saved}

    def save(self, folder: "epath.Path") -> None:
        """Write the files into a folder, which is made. Raises OSError."""
        tokenizer_files.write(folder, self.files())

    def __reduce__(self):
        # A pickled engine of tokenizers forgets that text never makes special tokens.
        return of_content, (self.kind, self.content, "a pickle", self.bos, self.eos)

    def _documents(self, batches: Iterable[Sequence[int]]) -> list[np.ndarray]:
        return [
            tokenizer_files.document(np.asarray(tokens, np.int32), self.bos, self.eos)
            for tokens in batches
        ]


class HuggingFaceTokenizer(SubwordTokenizer):
    """A tokenizer.json. It gives back every text exactly when it is a byte-level BPE without a
    normalizer; others may change spaces, accents or case."""

    kind = "huggingface"

    def special_tokens(self, names: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The tokens that start and end a document, by the file _CONFIG or their usual names.

        null in the file is none; a key that it lacks says nothing.
        """
        return (
            self._token(names, "bos_token", BOS_NAMES),
            self._token(names, "eos_token", EOS_NAMES),
        )

    def _token(self, names, key, usual):
        name = names.get(key)
        if isinstance(name, dict):
            name = name.get("content")
        candidates = usual if key not in names else (name,) if isinstance(name, str) else ()
        found = [self.engine.token_to_id(each) for each in candidates]
        return next((token for token in found if token is not None), None)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without bos and eos. Text that reads like bos or eos stays text."""
        return self.engine.encode(_utf8(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of documents, int32, each with bos and eos. Takes all cores.

        1.8 MB a second on a core: Python source, a byte-level BPE of 32,000 tokens.
        """
        texts = [_utf8(text) for text in texts]
        found = self.engine.encode_batch_fast(texts, add_special_tokens=False)
        return self._documents(each.ids for each in found)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Special tokens and numbers that are no token have none."""
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        return self.engine.decode(known, skip_special_tokens=True)


    def token_bytes(self) -> np.ndarray:
        """Bytes of each token, int32 [vocab_size] (Tokenizer).

        A token of a byte-level BPE has a letter for each byte.
        """
        model = json.loads(self.engine.to_str())
        byte_level = "ByteLevel" in json.dumps(model["decoder"])
        added = self.engine.get_added_tokens_decoder()
        bytes_V = np.zeros(self.vocab_size, np.int32)
        for text, token in self.engine.get_vocab(with_added_tokens=True).items():
            if token in added:
                bytes_V[token] = 0 if added[token].special else len(added[token].content.encode())
            else:
                bytes_V[token] = len(text) if byte_level else _piece_bytes(text)
        return bytes_V


class SentencePieceTokenizer(SubwordTokenizer):
    """A tokenizer.model. It gives back every text exactly when it was trained with byte_fallback,
    without a normalization rule and with spaces left alone; U+2581 alone becomes a space."""

    kind = "sentencepiece"

    def special_tokens(self, names: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The tokens that start and end a document, as the model says."""
        found = self.engine.bos_id(), self.engine.eos_id()
        bos, eos = (token if token >= 0 else None for token in found)
        return bos, eos

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without bos and eos. Text that reads like bos or eos stays text."""
        return self.engine.encode(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of documents, int32, each with bos and eos. Takes all cores."""
        return self._documents(self.engine.encode([_utf8(text) for text in texts]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Special tokens and numbers that are no token have none."""
        return self.engine.decode([int(token) for token in tokens if 0 <= token < self.vocab_size])


    def token_bytes(self) -> np.ndarray:
        """Bytes of each token, int32 [vocab_size] (Tokenizer)."""
        engine = self.engine
        return np.array(
            [
                0 if engine.is_control(token) else _piece_bytes(engine.id_to_piece(token))
                for token in range(self.vocab_size)
            ],
            np.int32,
        )


def _piece_bytes(piece: str) -> int:
    """Bytes of a piece in which U+2581 is a space and <0xE2> a byte."""
    if _BYTE_PIECE.fullmatch(piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())


def _utf8(text: str) -> str:
    """A text with a question mark for each half of a surrogate pair."""
    return to_bytes(text).decode()


def read(kind: str, path: str) -> Source:
    """The file of a tokenizer. kind: tokenizer_type; path: tokenizer_path.

    path: a file, a folder with the file that FILES names (that of a run or a checkpoint too), or
    for huggingface a name on the hub, which is downloaded unless Hugging Face's cache has it.
    Raises DataError when there is none, ConfigError without a package.
    """
    given = os.path.expanduser(path)
    if not os.path.exists(given) and kind == "huggingface" and _HUB_NAME.fullmatch(path):
        return _downloaded(path)
    file = os.path.join(given, FILES[kind]) if os.path.isdir(given) else given
    where = f"tokenizer_path={path}"
    content = _content(file, where, kind)
    beside = os.path.dirname(file) if os.path.basename(file) == FILES[kind] else None
    names, saved = (_beside(beside, name) for name in (_CONFIG, SETTINGS))
    return Source(kind, content, where, names, saved)


def _beside(folder: str | None, name: str) -> Mapping[str, Any]:
    """Fields of a file beside the tokenizer's; none where there is no such file."""
    file = os.path.join(folder or "", name)
    if folder is None or not os.path.isfile(file):
        return {}
    with open(file, "rb") as opened:
        return _names(opened.read(), file)


def _content(file: str, where: str, kind: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        hub = ", or a name of the hub as in openai-community/gpt2" if kind == "huggingface" else ""
        raise DataError(
            f"{where}: {file} cannot be read ({error.strerror}). Give a {FILES[kind]}, a folder "
            f"that holds one{hub}."
        ) from error


def _downloaded(name: str) -> Source:
    hub = _package("huggingface_hub", "huggingface")
    errors = _package("huggingface_hub.errors", "huggingface")
    failures = (OSError, ValueError, errors.EntryNotFoundError)
    where = f"tokenizer_path={name}"
    try:
        file = hub.hf_hub_download(name, FILES["huggingface"])
    except failures as error:
        raise DataError(
            f"{where} is no file or folder, and the hub gives no {FILES['huggingface']} by that "
            f"name ({str(error).splitlines()[0].rstrip('.')}). On a machine with a network run `hf "
            f"download {name} --include 'tokenizer*' --local-dir DIR`, then set tokenizer_path=DIR."
        ) from error
    try:
        names = _names(_content(hub.hf_hub_download(name, _CONFIG), where, "huggingface"), _CONFIG)
    except errors.EntryNotFoundError:
        names = {}
    return Source("huggingface", _content(file, where, "huggingface"), where, names, {})


def _names(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        fields = json_text.parse(content)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}. Mend it or remove it.") from error
    return fields if isinstance(fields, dict) else {}


def of_source(source: Source, *, add_bos: bool, add_eos: bool) -> SubwordTokenizer:
    """The tokenizer of a file, with those of its tokens around a document that are asked for.

    Raises DataError when the file is no tokenizer, ConfigError when a token is missing.
    """
    bare = of_content(source.kind, source.content, where=source.where, bos=None, eos=None)
    bos, eos = bare.special_tokens(source.names)
    if source.saved:
        bos, eos = source.saved.get("bos"), source.saved.get("eos")
    for key, wanted, token, what in (
        ("add_bos", add_bos, bos, "starts"),
        ("add_eos", add_eos, eos, "ends"),
    ):
        if wanted and token is None:
            raise ConfigError(
                f"{key}=true, but {source.where} has no token that {what} a document. Set "
                f"{key}=false, or name its {key.removeprefix('add_')}_token in a {_CONFIG} beside "
                f"{FILES['huggingface']}."
            )
    return dataclasses.replace(bare, bos=bos if add_bos else None, eos=eos if add_eos else None)


def of_content(
    kind: str, content: bytes, where: str, bos: int | None, eos: int | None
) -> SubwordTokenizer:
    """The tokenizer of a file's content. kind: tokenizer_type; where: for messages.

    Raises DataError when it is no tokenizer, ConfigError without the package.
    """
    module = package(kind)
    if kind == "huggingface":
        try:
            engine = module.Tokenizer.from_buffer(content)
        except ValueError as error:
            raise _no_tokenizer(kind, where, str(error)) from error
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        size = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return HuggingFaceTokenizer(content, bos, eos, size, engine)
    try:
        engine = module.SentencePieceProcessor()
        engine.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise _no_tokenizer(kind, where, "it does not parse") from error
    return SentencePieceTokenizer(content, bos, eos, engine.vocab_size(), engine)


def _no_tokenizer(kind: str, where: str, why: str) -> DataError:
    return DataError(
        f"{where} is no {FILES[kind]} of tokenizer_type={kind}: {why}. Give another file, or the "
        "tokenizer_type that it has."
    )


def package(kind: str) -> types.ModuleType:
    """The package that reads a tokenizer_type. Raises ConfigError where it is not installed."""
    return _package(_PACKAGES[kind], kind)


def _package(name: str, kind: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tokenizer_type={kind} needs the package {name}, which is not installed: pip install "
            "-e '.[text]' in a checkout of maxdiloco, or use tokenizer_type=byte."
        ) from error
