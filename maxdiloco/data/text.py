"""Windows of a text: L tokens each, cut from its documents as packing.py lays them out.

    # N windows asked for  L tokens

Each document begins with the token that starts a document.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from maxdiloco.data import packing
from maxdiloco.data.documents import TokenDocuments
from maxdiloco.data.line_index import LineIndex
from maxdiloco.data.split import Source, held_out, open_split
from maxdiloco.errors import DataError


@dataclasses.dataclass(frozen=True)
class TextWindows:
    """Windows first .. first + num_windows - 1 of the documents.

    layout: all of their windows. packing: of which kind it is (packing.layout).
    """

    documents: TokenDocuments
    layout: packing.Layout
    length: int
    packing: str
    first: int
    num_windows: int

    @property
    def padded(self) -> bool:
        """Whether windows may hold padding."""
        return self.packing != packing.CONCATENATED

    def read(self, windows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and segment ids, int32 [N, L], of windows counted from `first`.

        Segments number the documents of a window from 1; 0 is padding, which has token 0.
        Raises DataError when a file has changed since it was opened.
        """
        tokens_NL = np.zeros((len(windows_N), self.length), np.int32)
        segments_NL = np.zeros_like(tokens_NL)
        for row, window in enumerate(windows_N):
            self._fill(int(window) + self.first, tokens_NL[row], segments_NL[row])
        return tokens_NL, segments_NL

    def _fill(self, window, tokens_L, segments_L):
        places, pieces = self.layout.pieces(window)
        for segment, (place, data) in enumerate(
            zip(places, self.documents.read(pieces), strict=True), start=1
        ):
            segments_L[place : place + len(data)] = segment
            tokens_L[place : place + len(data)] = data

    def num_tokens(self, windows_N: np.ndarray) -> np.ndarray:
        """Tokens in windows that are no padding, int64 [N]."""
        return self.layout.num_tokens(np.asarray(windows_N, np.int64) + self.first)

    def fingerprint(self) -> str:
        """16 hexadecimal digits: a hash of the documents' identity, the windows and L.

        Names and lengths, read from no file: see `contents`.
        """
        return self._hash(self.documents.identity())

    def contents(self) -> str:
        """The same of the documents' contents, of which a bounded part is read.

        Processes of a run, and a run and its checkpoint, have the same data when these agree.
        """
        return self._hash(self.documents.contents())

    def _hash(self, parts: Iterable[bytes]) -> str:
        shape = (self.length, self.first, self.num_windows)
        # The others differ in the number of windows: where that is equal, so are the windows.
        if self.packing == packing.BEST_FIT:
            shape = (*shape, self.packing)
        digest = hashlib.sha256(f"{shape}\n".encode())
        for part in parts:
            digest.update(part)
        return digest.hexdigest()[:16]


def open_text(
    cfg,
    *,
    split: str,
    index: LineIndex | None = None,
    prepared: Mapping[Source, str] | None = None,
) -> tuple[TextWindows, str]:
    """Windows of the text of a split, train or eval, and its flag and path, for messages.

    index, prepared: as for split.open_split, which chooses the documents. Where the splits share
    them, the last of the windows are held out for eval, eval_fraction of them, at least one.
    Raises DataError when the split has no sequence or vocab_size is too small.
    """
    documents, name, by_window = open_split(cfg, split=split, index=index, prepared=prepared)
    kind = cfg.grain_packing_type if cfg.packing else packing.DOCUMENTS_APART
    layout = packing.layout(documents.lengths, cfg.max_target_length, kind)
    first, num_windows = 0, layout.num_windows
    if by_window:
        first, num_windows = _by_window(layout.num_windows, split, held_out(cfg))
    if num_windows < 1:
        raise DataError(
            f"{name} is too short: its {documents.lengths.sum()} tokens leave no sequence of "
            f"max_target_length={cfg.max_target_length} for {split}. Give more text or lower "
            "max_target_length."
        )
    windows = TextWindows(documents, layout, cfg.max_target_length, kind, first, num_windows)
    return windows, name


def _by_window(count, split, share):
    held = max(1, int(count * share)) if count else 0
    return (count - held, held) if split == "eval" else (0, count - held)
