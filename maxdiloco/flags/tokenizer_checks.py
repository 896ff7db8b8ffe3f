"""Checks of the keys of the tokenizer; its files are looked at by data.tokenizer."""

import re
from typing import Any

from maxdiloco.errors import ConfigError

BYTE_TOKENS = 257  # 256 byte values and the token that starts a document


def check(cfg: Any) -> None:
    """Raise ConfigError for keys of the tokenizer that cannot work together."""
    if cfg.tokenizer_type != "byte":
        _of_file(cfg)
        return
    if cfg.tokenizer_path:
        raise ConfigError(
            f"tokenizer_path={cfg.tokenizer_path} does nothing with tokenizer_type=byte. Set "
            f"tokenizer_type={_kind(cfg.tokenizer_path)}, or leave tokenizer_path out."
        )
    if not cfg.add_bos:
        raise ConfigError(
            "add_bos=false does nothing with tokenizer_type=byte: its token 256 starts every "
            "document. Leave add_bos out."
        )
    if cfg.dataset_type == "text" and -1 != cfg.vocab_size < BYTE_TOKENS:
        raise ConfigError(
            f"vocab_size={cfg.vocab_size} is too small: tokenizer_type=byte needs {BYTE_TOKENS}, "
            f"256 bytes and the start of a document. Use vocab_size={BYTE_TOKENS} or more."
        )


def _of_file(cfg: Any) -> None:
    path = cfg.tokenizer_path
    if not path:
        raise ConfigError(
            f"tokenizer_path is empty, but tokenizer_type={cfg.tokenizer_type} is read from a "
            f"file. Set tokenizer_path to it, or use tokenizer_type=byte."
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise ConfigError(
            f"tokenizer_path={path} is an address. Copy the tokenizer to every host and give its "
            f"folder."
        )


def _kind(path: str) -> str:
    return "sentencepiece" if path.endswith(".model") else "huggingface"
