"""The tokenizer of a run: the rows of the embedding, and copies in checkpoints.

Imports no JAX, so that vocab_size=auto is resolved before anything is built.
"""

from etils import epath

from maxdiloco.config import config
from maxdiloco.data import tokenizer as tokenizers
from maxdiloco.data.tokenizer import SubwordTokenizer, TokenizerSettings
from maxdiloco.data.tokenizer_base import ByteTokenizer, Tokenizer
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_folder import CHECK_AND_RESTART

# The rows of the embedding are a multiple of the lanes of a TPU, so that devices can divide them.
_MULTIPLE = 128
# A tokenizer that fills this share of a named model's rows may be the model's own. The rows of the
# published weights are then kept. Qwen3's tokenizer fills 99.8%, DeepSeek-V2's 97.7%.
_OWN = 0.95
FOLDER = "tokenizer"  # in a run's folder and in a checkpoint


def resolve_vocab_size(cfg: config.Config) -> config.Config:
    """Return the config with numbers instead of vocab_size=auto and of unset embedding rows.

    They come from the tokenizer, with the rows rounded up, or from the model file if the tokenizer
    fills nearly all of its rows.

    Raises:
      DataError: see data.tokenizer.build.
      ConfigError: see data.tokenizer.build, or the result fails the checks of the config.
    """
    if cfg.vocab_size != "auto":
        return cfg
    size, rows = tokenizers.build(vars(cfg)).vocab_size, cfg.padded_vocab_size
    of_model = config.model_vocab_size(cfg)
    if of_model is not None and _OWN * of_model <= size <= of_model:
        size = of_model
    elif rows == "auto" and size % _MULTIPLE:
        rows = -(-size // _MULTIPLE) * _MULTIPLE
    return config.check(vars(cfg) | {"vocab_size": size, "padded_vocab_size": rows})


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Open the tokenizer of a run. Raises DataError, ConfigError: see data.tokenizer.build."""
    if settings.tokenizer_type == "byte" and settings.dataset_type == "synthetic":
        return ByteTokenizer()  # these data may have fewer tokens than there are bytes
    return tokenizers.build(vars(settings), settings.vocab_size)


def travelling_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return {path: content} of the files for a checkpoint. The byte tokenizer needs none."""
    if isinstance(tokenizer, ByteTokenizer):
        return {}
    return {f"{FOLDER}/{name}": content for name, content in tokenizer.files().items()}


def of_checkpoint(settings: TokenizerSettings, checkpoint: epath.Path) -> Tokenizer:
    """Return the tokenizer in a checkpoint, with add_bos as the settings say.

    Args:
      settings: settings of the run that wrote the checkpoint. add_bos may have another value.
      checkpoint: the folder of the checkpoint.

    Raises:
      CheckpointError: the tokenizer cannot be read.
      DataError: the checkpoint has no tokenizer.
      ConfigError: add_bos=true, and the tokenizer has no such token.
    """
    if settings.tokenizer_type == "byte":
        return tokenizers.build(vars(settings), settings.vocab_size)
    with replace_os_error(
        CheckpointError, f"the tokenizer in {checkpoint} cannot be read", CHECK_AND_RESTART
    ):
        found = tokenizers.load(checkpoint / FOLDER)
    if isinstance(found, SubwordTokenizer) and settings.add_bos != (found.bos is not None):
        return found.with_added_tokens(
            bos=settings.add_bos, eos=found.eos is not None, where=f"RUN={checkpoint}"
        )
    return found
