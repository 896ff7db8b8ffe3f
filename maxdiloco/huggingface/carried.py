"""The files beside a model's weights that an import keeps and an export gives back."""

import pathlib

CONFIG = "config.json"
_FILES = {
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
}  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
# Beginnings of the names of files that say who may do what with the model, in any case.
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")


def copy(source: pathlib.Path, target: pathlib.Path, *, licence_alone: bool = False) -> None:
    """Copy what is there of them but config.json. target: a folder, made if there is none.

    licence_alone: without what belongs to the tokenizer. Raises OSError.
    """
    target.mkdir(exist_ok=True)
    names = set() if licence_alone else _FILES
    for path in sorted(source.iterdir()):
        if path.is_file() and (path.name in names or path.name.lower().startswith(_LICENCES)):
            (target / path.name).write_bytes(path.read_bytes())
    templates = [] if licence_alone else sorted((source / _TEMPLATES).glob("*.jinja"))
    if templates:
        (target / _TEMPLATES).mkdir(exist_ok=True)
    for path in templates:
        (target / _TEMPLATES / path.name).write_bytes(path.read_bytes())
