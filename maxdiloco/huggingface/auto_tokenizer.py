"""Read the tokenizer of a Hugging Face model, as transformers' AutoTokenizer makes it.

Which tokens AutoTokenizer adds to a text depends on its class, on the files and on the version of
transformers. This module asks AutoTokenizer and decides nothing by itself.
"""

import dataclasses
import pathlib
import tempfile
import types
from typing import NamedTuple

from maxdiloco import json_text, small_files
from maxdiloco.data import packages
from maxdiloco.data import tokenizer as tokenizers
from maxdiloco.data.tokenizer import (
    FILES,
    MOST_BYTES,
    ByteTokenizer,
    SentencePieceTokenizer,
    SubwordTokenizer,
)
from maxdiloco.data.tokenizer_base import Tokenizer, meaning
from maxdiloco.errors import DataError
from maxdiloco.huggingface import folders, sidecar_files
from maxdiloco.huggingface.folders import Folder


class TransformersTokenizer(NamedTuple):
    """A tokenizer of Hugging Face.

    Attributes:
      tokenizer: the tokenizer. It adds the tokens that transformers adds to a text, but at most one
        before and one after the text.
      left_out: the other tokens that transformers adds.
    """

    tokenizer: SubwordTokenizer
    left_out: tuple[int, ...]


def read(folder: Folder) -> TransformersTokenizer | None:
    """Read the tokenizer of a model.

    Args:
      folder: the folder of the model, local or in a bucket.

    Returns:
      The tokenizer, or None if the folder has neither a tokenizer.json nor a tokenizer.model.

    Raises:
      DataError: transformers cannot load the tokenizer.
      CheckpointError: a file cannot be read.
      ConfigError: transformers is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="maxdiloco-tokenizer-") as copy:
        here = pathlib.Path(copy)
        sidecar_files.copy_files(folder, here, sidecar_files.OF_TOKENIZER.__contains__)
        kind = next((kind for kind, name in FILES.items() if (here / name).is_file()), None)
        if kind is None:
            return None
        content = (here / FILES[kind]).read_bytes()
        where = str(folder / FILES[kind])
        of_file = tokenizers.from_content(kind, content, where)  # refuses a damaged file
        transformers = packages.require("transformers", "A model of Hugging Face", extra="hf")
        transformers.utils.logging.set_verbosity_error()
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(
                here, local_files_only=True, trust_remote_code=False
            )
            converted = theirs.backend_tokenizer.to_str().encode()
            named_bos, named_eos = theirs.bos_token_id, theirs.eos_token_id
            ends = _ends(here, transformers)
        except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
                TypeError, ValueError) as error:  # fmt: skip
            raise DataError(
                f"{where}: transformers cannot load the tokenizer: {' '.join(str(error).split())}. "
                "Give a folder that AutoTokenizer.from_pretrained loads."
            ) from error
    found = tokenizers.from_content("huggingface", converted, where)
    before, after = found.added_tokens()
    bos, eos = before[-1] if before else None, after[0] if after else None
    if kind == found.kind and same_tokens(of_file, found):
        found = of_file
    named_bos, named_eos = named_bos if bos is None else bos, named_eos if eos is None else eos
    found = dataclasses.replace(
        found, bos=bos, eos=eos, named_bos=named_bos, named_eos=named_eos, ends=ends
    )
    return TransformersTokenizer(found, (*before[:-1], *after[1:]))


def is_of_model(folder: Folder, tokenizer: Tokenizer | None) -> bool:
    """Return whether the model in a folder has the tokenizer of a run.

    Args:
      folder: as for `read`.
      tokenizer: the tokenizer of the run. None: its tokens are numbers, not text, and the result is
        True.

    Raises:
      DataError, CheckpointError, ConfigError: as `read`.
    """
    if tokenizer is None:
        return True
    if isinstance(tokenizer, SentencePieceTokenizer):
        file = folder / FILES[tokenizer.kind]
        with folders.replace_read_error(file):
            return file.is_file() and small_files.read_bytes(file, MOST_BYTES) == tokenizer.content
    found = read(folder)
    if found is None or isinstance(tokenizer, ByteTokenizer):
        return found is None and isinstance(tokenizer, ByteTokenizer)
    return same_tokens(found.tokenizer, tokenizer)


def same_tokens(one: SubwordTokenizer, other: SubwordTokenizer) -> bool:
    """Return whether two tokenizers of the same kind encode every text as the same tokens.

    An old tokenizer.json lacks entries that the package tokenizers writes today, so the package
    writes both files again before they are compared.
    """
    contents = (
        each.engine.to_str().encode() if each.kind == "huggingface" else each.content
        for each in (one, other)
    )
    first, second = map(meaning, contents)
    return first == second


def _ends(folder: pathlib.Path, transformers: types.ModuleType) -> tuple[int, ...]:
    """Return the tokens at which transformers' `generate` stops for the model in a folder."""
    file = folder / sidecar_files.GENERATION
    if file.is_file():
        ends = json_text.fields(small_files.read_bytes(file)).get("eos_token_id")
    else:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        ends = transformers.GenerationConfig.from_model_config(config).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(end for end in ends if type(end) is int)
