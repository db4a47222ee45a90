"""Labels of windows that are measured, for oracles: what a router that knows would choose by.

N tokens of a window, C label columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenrouter.executors import PoolSpec
from tokenrouter.kernels import KernelSet
from tokenrouter.models import LoadedModel
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import LabelMaker
from tokenrouter.training.low_path import low_path


def labels_of(
    windows: Sequence[Sequence[int]],
    *,
    model: LoadedModel,
    spec: PoolSpec,
    maker: LabelMaker,
    seed: int = 0,
    on_done: Callable[[int], None] = lambda index: None,
    kernels: KernelSet | None = None,
) -> list[Tensor]:
    """Labels of every token of ``windows``.

    Args:
        windows: token ids, each a request of its own.
        model: in float32.
        spec: the pool whose low path the labels are about.
        maker: such as ``Fisher()``.
        seed: of what is drawn; every window draws on its own.
        on_done: called with the index of each window when it is done.
        kernels: the operators of the low path; None: the fastest that this machine has.

    Returns:
        Per window float32 ``[N, C]``, not negative; of a precision label, the sum over the columns of some layers is
        the label of these layers.

    Raises:
        ValueError: no windows, a model in another dtype, a pool without a known low path, or a window that the maker
            refuses.
    """
    if not windows:
        raise ValueError("no windows to label: give at least one")
    decoder = DifferentiableDecoder(model, low_path(spec, model), kernels)
    found = []
    for index, ids in enumerate(windows):
        found.append(maker(decoder, torch.tensor(ids, dtype=torch.int64), seed + index))
        on_done(index)
    return found
