"""What the learned policy knows of an entry: the attention that it received, its age, and what its token repeats.

N entries, S tokens seen, F features. All of it comes from one request, so nothing depends on batch mates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries

RECENT = 128
"""Last tokens whose ids, pairs and triples count as being read at present."""
NEIGHBOURS = 5
REGION = 33
_FLOOR = 1e-3  # of relative attention, in front of the logarithm
_VOCAB = 1 << 20  # more than any vocabulary: ids side by side in one integer stay apart


def entry_features(entries: Entries) -> Tensor:
    """Float32 ``[N, F]`` in the order of ``ENTRY_FEATURES``.

    Attention is relative (1: what every entry would get if all got the same) and in logarithms, so that neither the
    length of the request nor the number of observed queries changes its meaning.
    """
    known = {**_attention(entries), **_place(entries), **_repeats(entries)}
    return torch.stack([known[name] for name in ENTRY_FEATURES], 1)


def _attention(entries: Entries) -> dict[str, Tensor]:
    last_N, mean_N = (x * entries.num_seen for x in (entries.last_N, entries.mean_N))
    pad = REGION // 2
    pooled_N = F.max_pool1d(last_N[None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]
    region_N = F.avg_pool1d(last_N[None], REGION, 1, pad, count_include_pad=False)[0]
    return {
        "last": _log(last_N),
        "mean": _log(mean_N),
        "last_of_neighbours": _log(pooled_N),
        "last_of_region": _log(region_N),
        "last_rank": _rank(last_N),
        "mean_rank": _rank(mean_N),
    }


def _place(entries: Entries) -> dict[str, Tensor]:
    seen, positions_N = entries.num_seen, entries.positions_N
    age_N = (seen - 1 - positions_N).float()
    return {
        "age": age_N.log1p(),
        "age_frac": age_N / seen,
        "num_seen": torch.full_like(age_N, seen).log(),
        "depth": torch.full_like(age_N, entries.depth),
    }


def _repeats(entries: Entries) -> dict[str, Tensor]:
    """Of the entry's id, and of the ids before it: what follows an earlier copy of what is read now is looked at."""
    ids_S, at_N = entries.ids_S, entries.positions_N
    _, group_S, counts = ids_S.unique(return_inverse=True, return_counts=True)
    earlier_S = _earlier(group_S, counts)
    count_S = counts[group_S]
    pairs_S = _with_previous(ids_S, ids_S)
    triples_S = _with_previous(pairs_S, ids_S)
    return {
        "count": count_S[at_N].float().log(),
        "later": (count_S - earlier_S - 1)[at_N].float().log1p(),
        "recent": _times_recent(ids_S, at_N),
        "follows_recent": _times_recent(ids_S, at_N - 1),
        "follows_recent_pair": _times_recent(pairs_S, at_N - 1),
        "follows_recent_triple": _times_recent(triples_S, at_N - 1),
        "ends_recent_pair": _times_recent(pairs_S, at_N),
    }


def _log(relative_N: Tensor) -> Tensor:
    return (relative_N + _FLOOR).log()


def _rank(value_N: Tensor) -> Tensor:
    """0 for the smallest to 1; of equals the newer is the larger."""
    rank_N = torch.empty_like(value_N)
    order_N = value_N.sort(stable=True).indices
    rank_N[order_N] = torch.linspace(0, 1, len(value_N))
    return rank_N


def _earlier(group_S: Tensor, counts: Tensor) -> Tensor:
    """Of each token, how often its id came before it."""
    order_S = group_S.sort(stable=True).indices
    starts = counts.cumsum(0) - counts
    earlier_S = torch.empty_like(group_S)
    earlier_S[order_S] = torch.arange(len(group_S)) - starts[group_S[order_S]]
    return earlier_S


def _with_previous(codes_S: Tensor, ids_S: Tensor) -> Tensor:
    """The code of what stands one before, and the id: -1 where there is nothing before."""
    joined_S = torch.full_like(ids_S, -1)
    joined_S[1:] = codes_S[:-1] * _VOCAB + ids_S[1:]
    joined_S[1:][codes_S[:-1] < 0] = -1
    return joined_S


def _times_recent(codes_S: Tensor, at_N: Tensor) -> Tensor:
    """``log1p`` of how often the code at each place is among the last ``RECENT`` ones; 0 where there is none."""
    code_N = codes_S[at_N.clamp_min(0)]
    recent = codes_S[-RECENT:].sort().values
    first_N = torch.searchsorted(recent, code_N)
    stop_N = torch.searchsorted(recent, code_N, right=True)
    is_none_N = (at_N < 0) | (code_N < 0)
    return (stop_N - first_N).masked_fill(is_none_N, 0).float().log1p()


ENTRY_FEATURES = (
    "last",
    "mean",
    "last_of_neighbours",
    "last_of_region",
    "last_rank",
    "mean_rank",
    "age",
    "age_frac",
    "num_seen",
    "depth",
    "count",
    "later",
    "recent",
    "follows_recent",
    "follows_recent_pair",
    "follows_recent_triple",
    "ends_recent_pair",
)
"""In the order of a trained policy's columns; a change of meaning needs a new format version."""
