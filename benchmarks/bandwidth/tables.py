"""Bandwidths that the papers publish [Gbit/s], for 50, 80, 90, 95 and 99 % of compute utilisation.

[S] Streaming DiLoCo, arXiv 2501.18512, Table 4. [E] eager updates, arXiv 2502.12996, Table 5.
[L] scaling laws, arXiv 2503.09799, Table 6, where inf is "1000.0+".
"""

from typing import NamedTuple


class Size(NamedTuple):
    """A model. step_s: time of an inner step without any exchange [s]."""

    name: str
    layers: int
    parameters: float
    step_s: float


TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
SIZES = (Size("1B", 24, 1e9, 0.1), Size("10B", 48, 1e10, 0.8), Size("100B", 108, 1e11, 4.9))
LARGE = (SIZES[1], Size("405B", 126, 4.05e11, 26.0), Size("671B", 61, 6.71e11, 20.0))

# [S] Table 4, by row and size.
STREAMING = {
    "data parallel": (
        "86.8 152.6 184.2 222.3 569.0",
        "104.8 222.3 222.3 268.3 471.5",
        "184.2 323.8 390.7 390.7 471.5",
    ),
    "DiLoCo": (
        "1.4 6.2 13.3 23.3 86.8",
        "1.7 7.5 16.0 33.9 104.8",
        "3.0 11.0 23.3 49.4 184.2",
    ),
    "streaming": (
        "1.4 5.2 9.1 16.0 28.1",
        "1.7 5.2 9.1 13.3 19.3",
        "2.4 6.2 9.1 11.0 19.3",
    ),
    "streaming, tau=1": (
        "1.4 4.3 6.2 9.1 11.0",
        "1.7 3.6 5.2 6.2 7.5",
        "1.7 3.6 4.3 5.2 5.2",
    ),
    "streaming, tau=1, 4 bits": (
        "0.4 0.9 1.7 2.0 3.0",
        "0.4 0.9 1.4 1.4 1.7",
        "0.5 0.9 1.1 1.1 1.4",
    ),
}
# [E] Table 5, its rows with H=100.
EAGER = {
    "eager, 4 bits": (
        "0.1 0.2 0.2 0.2 0.2",
        "0.1 0.2 0.2 0.3 0.3",
        "0.2 0.3 0.3 0.3 0.4",
    ),
}
# [L] Table 6: DiLoCo by H, for LARGE; H=1 is data parallelism.
SCALING = {
    1: (
        "104.8 184.2 222.3 222.3 390.7",
        "126.5 222.3 268.3 323.8 323.8",
        "323.8 569.0 686.6 686.6 inf",
    ),
    10: (
        "16.0 49.4 86.8 152.6 222.3",
        "19.3 72.0 126.5 184.2 268.3",
        "49.4 152.6 268.3 390.7 686.6",
    ),
    50: ("3.0 11.0 23.3 41.0 126.5", "3.6 13.3 28.1 59.6 184.2", "7.5 33.9 72.0 126.5 390.7"),
    100: ("1.4 6.2 13.3 23.3 86.8", "2.0 7.5 16.0 33.9 126.5", "4.3 16.0 41.0 72.0 268.3"),
    300: ("0.5 2.0 4.3 9.1 41.0", "0.7 3.0 6.2 13.3 59.6", "1.7 6.2 13.3 28.1 126.5"),
}  # fmt: skip
