"""The data of a run, opened before its folder: data that are refused must not create one."""

from collections.abc import Callable

from etils import epath

from maxdiloco.data import mixture, pipeline
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.pipeline import Dataset, TrainingData
from maxdiloco.flags.config import Config
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import RunFolder, reason
from maxdiloco.trainer import eval_texts
from maxdiloco.trainer.assemble import BatchShape
from maxdiloco.trainer.prepared import prepare_sources


def open_data(
    cfg: Config, shape: BatchShape, folder: RunFolder, say: Callable[[str], None]
) -> tuple[TrainingData, dict[str, Dataset], LineIndex]:
    """The training text, those to evaluate on (eval_texts) if the run does, and the index of all.

    folder: of the run. .jsonl files in the index of an earlier start are not read through again;
    the caller saves the new index (save_index) once the folder exists. Sources without known
    token counts are tokenised first, below base_output_directory.
    Raises DataError for data that are missing, unreadable or too short for a step.
    """
    prepared = prepare_sources(cfg, say)
    index = LineIndex(cfg.text_column, report=say)
    if cfg.dataset_type == "text":
        load_index(index, folder.line_index)
    train = mixture.open_dataset(cfg, split="train", index=index, prepared=prepared)
    pipeline.check_size(train, train.first_position(shape.num_replicas, shape.sequences))
    held_out = {}
    if cfg.eval_interval != -1:
        held_out = eval_texts.open_texts(cfg, index=index, prepared=prepared)
    return train, held_out, index


def load_index(index: LineIndex, path: epath.Path) -> None:
    """Take over the index of an earlier start; a failure costs time and is reported in a line."""
    try:
        with object_store.as_os_errors(path):
            index.load(path)
    except OSError as error:
        index.report(f"note: {path} cannot be read ({reason(error)}): .jsonl files are read.")


def save_index(index: LineIndex, path: epath.Path) -> None:
    """Keep the index for the next start; a failure is reported in a line."""
    try:
        with object_store.as_os_errors(path):
            index.save(path)
    except OSError as error:
        index.report(
            f"note: {path} cannot be written ({reason(error)}): the next start reads .jsonl files "
            "through again."
        )
