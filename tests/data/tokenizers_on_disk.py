"""Small tokenizers of both packages, trained on a part of Python's standard library."""

import io
import pathlib
import sysconfig

import sentencepiece

from maxdiloco import tokenizer as program

STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])
SOURCES = [str(STDLIB / name) for name in ("argparse.py", "ast.py", "json/decoder.py")]


def byte_level_bpe(folder, vocab_size=600):
    """Path of a tokenizer.json as maxdiloco.tokenizer makes it."""
    texts = [pathlib.Path(path).read_bytes().decode() for path in SOURCES]
    path = folder / "tokenizer.json"
    path.write_text(program.train(texts, vocab_size).to_str())
    return path


def sentencepiece_model(folder, **options):
    """Path of a tokenizer.model that leaves the text alone, unless options say otherwise."""
    lines = [line for path in SOURCES for line in pathlib.Path(path).read_text().splitlines()]
    model = io.BytesIO()
    exact = dict(
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        num_threads=1,
        minloglevel=2,
        **exact | options,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path
