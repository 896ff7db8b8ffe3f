"""The data of a run, opened before its folder: data that are refused must not create one."""

from collections.abc import Callable, Mapping

from etils import epath

from maxdiloco.data import kinds, shards
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.mixture import TrainingData
from maxdiloco.data.order import Position
from maxdiloco.data.pipeline import Dataset
from maxdiloco.data.tokenizer_base import Tokenizer
from maxdiloco.evaluation import run_texts
from maxdiloco.flags import eval_paths
from maxdiloco.flags.config import Config
from maxdiloco.storage.run_folder import RunFolder
from maxdiloco.trainer import run_files
from maxdiloco.trainer.assemble import BatchShape

# Times eval_fraction: our choice; a source without enough sequences for its share has more.
_LARGE = 2


def open_data(
    cfg: Config,
    tokenizer: Tokenizer,
    shape: BatchShape,
    folder: RunFolder,
    say: Callable[[str], None],
) -> tuple[TrainingData, dict[str, Dataset], LineIndex]:
    """The training text, those to evaluate on (run_texts) if the run does, and the index of all.

    folder: of the run. The caller saves the index (save_index) once the folder exists. Sources
    without known token counts are tokenised first, below base_output_directory.
    Raises DataError for data that are missing, unreadable or too short for a step.
    """
    prepared = run_texts.prepare(cfg, tokenizer, say)
    index = LineIndex(cfg.text_column, report=say)
    if any(source.kind == "text" for source in run_texts.trained(cfg).values()):
        load_index(index, folder.line_index)
    train = run_texts.open_dataset(cfg, tokenizer, split="train", index=index, prepared=prepared)
    train.check_size(train.first_position(shape.num_replicas, shape.sequences))
    held_out = {}
    if cfg.eval_interval != -1:
        held_out = run_texts.open_evaluated(cfg, tokenizer, index=index, prepared=prepared)
    return train, held_out, index


def lines(
    cfg: Config, text: TrainingData, held_out: Mapping[str, Dataset], shape: BatchShape
) -> list[str]:
    """What is read, what lies in the folder beside it, and what is held out, for the user."""
    out = text.summary(text.first_position(shape.num_replicas, shape.sequences))
    if text.computed:
        return out
    for name, source in run_texts.trained(cfg).items():
        if not shards.is_folder(source.path):
            line = kinds.left_out_line(source, run_texts.key_of(name))
            out += [line] if line else []
    for name, dataset in held_out.items():
        out.append(
            f"held out{f' as {name}' if name else ''}: {dataset.num_windows:,} sequences, of which "
            f"an evaluation reads {'all' if cfg.eval_steps == -1 else f'{cfg.eval_steps} batches'}"
        )
    for name, path in eval_paths.named(cfg).items():
        if held_out and not path:
            out += _large_shares(cfg, text, held_out[name])
    if eval_paths.holds_out(cfg) and not held_out and cfg.eval_fraction:
        out.append(
            f"held out: eval_fraction={cfg.eval_fraction}, and never evaluated (eval_interval=-1); "
            "eval_fraction=0 trains on all of the text"
        )
    return out


def _large_shares(cfg: Config, text: TrainingData, held: Dataset) -> list[str]:
    """A warning for each source of which far more is held out than eval_fraction says."""
    pairs = [(text, held.windows)]
    if cfg.dataset_mixture:
        pairs = list(zip(text.sources, held.windows.sources, strict=True))
    out = []
    for source, windows in pairs:
        share = windows.num_windows / (windows.num_windows + source.num_windows)
        if share > _LARGE * cfg.eval_fraction:
            out.append(
                f"warning: {share:.0%} of {source.name} is held out, not eval_fraction="
                f"{cfg.eval_fraction}: it has {windows.num_windows + source.num_windows} sequences "
                "and one is the least. Give more text, or set eval_dataset_path."
            )
    return out


def metrics(text: TrainingData, position: Position, length: int, step: int) -> dict[str, float]:
    """learning/tokens, read by all replicas up to the end of a step, and data/* of the text."""
    sequences = position.base + position.sequences_before(step + 1)
    return {"learning/tokens": sequences * length} | text.metrics(position, step)


def load_index(index: LineIndex, path: epath.Path) -> None:
    """Take over the index of an earlier start; a failure costs time and is reported in a line."""
    with run_files.noted(path, index.report, "read", ": .jsonl files are read"):
        index.load(path)


def save_index(index: LineIndex, path: epath.Path) -> None:
    """Keep the index for the next start; a failure is reported in a line."""
    so = ": the next start reads .jsonl files through again"
    with run_files.noted(path, index.report, so=so):
        index.save(path)
