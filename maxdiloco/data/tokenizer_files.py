"""What all tokenizers do alike: a folder of files and their hash, the tokens around a document."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from maxdiloco import json_text

if TYPE_CHECKING:
    from etils import epath  # imported where it is used: benchmarks of a step do without

# Type of a saved tokenizer and the tokens around its documents, beside the files of its package.
SETTINGS = "settings.json"
# Parts of a tokenizer.json that add, cut or pad after the tokens of a text: none is used here.
_UNUSED = ("post_processor", "truncation", "padding")


def settings(kind: str, bos: int | None, eos: int | None) -> bytes:
    """Content of SETTINGS. kind: the value of tokenizer_type."""
    fields = {"tokenizer_type": kind, "bos": bos, "eos": eos}
    return (json.dumps(fields, sort_keys=True) + "\n").encode()


def fingerprint(files: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits: a hash of the name and the `meaning` of each file of a tokenizer."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        content = meaning(content)
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def meaning(content: bytes) -> bytes:
    """What of a tokenizer's file decides which tokens a text becomes.

    Of JSON the values, however they are written, but for those that are not used here: a
    tokenizer.json that `hf export` writes puts a token before each text, which add_bos decides
    here. Of other files all.
    """
    try:
        fields = json_text.parse(content)
    except ValueError:
        return content
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name not in _UNUSED}
    return json.dumps(fields, sort_keys=True).encode()


def write(folder: "epath.Path", files: Mapping[str, bytes]) -> None:
    """Write files into a folder, which is made. Raises OSError."""
    from etils import epath

    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def document(tokens_T: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    """Tokens of a text, int32 [T], between those that start and end a document."""
    before, after = ([] if token is None else [token] for token in (bos, eos))
    return np.concatenate([before, tokens_T, after]).astype(np.int32)


def to_bytes(text: str) -> bytes:
    """UTF-8 of a text, a question mark for what UTF-8 cannot hold."""
    return text.encode("utf-8", errors="replace")
