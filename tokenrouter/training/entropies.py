"""How unsure the model is before and behind each token of text: forward passes only, window by window.

Before a token is what a router may know when it decides in decode. What the low path costs is largely what the model
is unsure of behind the token, which is known only after its forward. Statistics over text say what to expect behind an
id.

N tokens of a window, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tokenrouter.features.signals import LOGIT_SIGNALS
from tokenrouter.features.uncertainty import uncertainty
from tokenrouter.files import replace_file
from tokenrouter.training.gradients import HEAD_ROWS, DifferentiableDecoder, Trace
from tokenrouter.training.storage import text_of
from tokenrouter.training.windows import Window

FOLDER = "entropies"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entropies:
    """Tokens of text and the model's entropy behind each.

    Attributes:
        ids_N: int64.
        previous_N: int64, the id before each in its window; -1 for a window's first.
        entropy_N: float32, nats.
    """

    ids_N: Tensor
    previous_N: Tensor
    entropy_N: Tensor


@torch.no_grad()
def next_token_entropy(decoder: DifferentiableDecoder, ids_N: Tensor) -> Tensor:
    """Entropy of the next-token distribution behind each token on the high path, float32 ``[N]``, nats.

    Raises:
        ValueError: as ``DifferentiableDecoder.trace``.
    """
    parts = []
    for rows_RE in decoder.trace(ids_N).inputs[-1].split(HEAD_ROWS):
        log_p_RV = decoder.logits(rows_RE).log_softmax(-1)
        parts.append(-(log_p_RV.exp() * log_p_RV).sum(1))
    return torch.cat(parts)


@torch.no_grad()
def previous_logits(decoder: DifferentiableDecoder, trace: Trace) -> dict[str, Tensor]:
    """What the logits before each token say, by teacher forcing on the high path.

    In an engine they are those of the path that the tokens before it took.

    Args:
        decoder: of the model.
        trace: of the tokens, by ``decoder``.

    Returns:
        Float32 ``[N]`` by signal of ``LOGIT_SIGNALS``; NaN for the first token, before which there are none.
    """
    parts = [
        uncertainty(decoder.logits(rows_RE), next_R, LOGIT_SIGNALS)
        for rows_RE, next_R in zip(
            trace.inputs[-1][:-1].split(HEAD_ROWS), trace.ids_N[1:].split(HEAD_ROWS), strict=True
        )
    ]
    first = torch.full((1,), math.nan)
    return {name: torch.cat([first, *(part[name] for part in parts)]) for name in LOGIT_SIGNALS}


def collect_entropies(
    windows: Iterable[Window],
    *,
    folder: Path,
    decoder: DifferentiableDecoder,
    on_done: Callable[[Window, bool], None],
) -> None:
    """Makes and stores the windows that are not there yet.

    Args:
        windows: of the training side.
        folder: of the data set. What is finished stays when this is interrupted.
        decoder: of the model.
        on_done: called after each window, with whether it was there already.

    Raises:
        ValueError: a window that the decoder refuses.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    for window in windows:
        path = folder / FOLDER / f"{window.name}.safetensors"
        was_there = path.exists()
        if not was_there:
            entropy_N = next_token_entropy(decoder, window.ids_N)
            replace_file(path, save({"token_id": window.ids_N.int(), "entropy": entropy_N}))
        on_done(window, was_there)


def load_entropies(
    folder: Path, without: Collection[str], texts: Collection[str] | None = None
) -> Entropies:
    """What ``collect_entropies`` stored.

    Args:
        folder: of the data set.
        without: names of windows to leave out: a token to learn from must not be in its own statistics.
        texts: names of sources; None: of all.

    Raises:
        ValueError: there are none, or one is damaged.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    found = [
        _read(path)
        for path in files
        if path.stem not in without and (texts is None or text_of(path.stem) in texts)
    ]
    if not found:
        raise ValueError(
            f"{folder} holds no entropies beside its labels: run its task=collect command again with "
            "collect.entropy_tokens above 0, which adds them, or train without: trainer.id_numbers=0"
        )
    firsts = [torch.cat([ids_N.new_tensor([-1]), ids_N[:-1]]) for ids_N, _ in found]
    return Entropies(
        ids_N=torch.cat([ids_N for ids_N, _ in found]),
        previous_N=torch.cat(firsts),
        entropy_N=torch.cat([entropy_N for _, entropy_N in found]),
    )


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        tensors = load(path.read_bytes())
        ids_N, entropy_N = tensors["token_id"].long(), tensors["entropy"].float()
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): remove it, and task=collect makes it again"
        ) from None
    if not bool(entropy_N.isfinite().all()):
        raise ValueError(f"{path} holds values that are not finite: remove it, and collect again")
    return ids_N, entropy_N
