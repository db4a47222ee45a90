"""A trained network as a router stores it: one table and head for all members, and few int8 numbers per id.

V vocabulary, C columns of the table, R numbers, S members, H hidden units of a member, P phases, K rows.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenrouter.routers.lookup import Bins
from tokenrouter.training.id_inputs import IdInputs
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.router_module import RouterModule

CLAMP = 8.0
"""Numbers beyond so many standard deviations are cut, so that a few odd ids do not coarsen all others."""


class Compressed(NamedTuple):
    """``codes_VR.float() @ weights_RC`` approximates the rows.

    Attributes:
        codes_VR: int8.
        weights_RC: float32.
    """

    codes_VR: Tensor
    weights_RC: Tensor


def compress(rows_VC: Tensor, count_V: Tensor, importance_C: Tensor, numbers: int) -> Compressed:
    """The closest product of ``numbers`` numbers per id and a matrix, rounded to int8.

    Args:
        rows_VC: float32.
        count_V: float32, how much each row counts; more than 0.
        importance_C: float32, how much each column counts; more than 0.
        numbers: R.
    """
    scaled_VC = rows_VC * importance_C
    gram_CC = (scaled_VC * count_V[:, None]).t() @ scaled_VC
    directions_CR = torch.linalg.eigh(gram_CC.double()).eigenvectors[:, -numbers:].float()
    number_VR = scaled_VC @ directions_CR
    spread_R = ((number_VR.square() * count_V[:, None]).sum(0) / count_V.sum()).sqrt()
    largest_R = torch.minimum(number_VR.abs().amax(0), spread_R * CLAMP).clamp_min(1e-12)
    step_R = largest_R / 127
    codes_VR = (number_VR / step_R).round().clamp(-127, 127).to(torch.int8)
    return Compressed(codes_VR, step_R[:, None] * directions_CR.t() / importance_C)


@torch.no_grad()
def router_tensors(
    module: RouterModule, data: RouterData, id_numbers: int, previous_numbers: int
) -> tuple[Bins, dict[str, Tensor]]:
    """The bins and tensors of an artifact.

    Args:
        module: trained on ``data``.
        data: where it knows ids, their rows become numbers.
        id_numbers: R of an id.
        previous_numbers: R of the id before.
    """
    table_KC = _merged(module, module.table)
    head_PH = module.head / module.members
    tensors = {"table": table_KC, "head": head_PH}
    if data.id_inputs is None:
        return data.bins, tensors
    bins, first = data.bins, data.bins.first_id_row
    inputs = data.id_inputs
    rows_VC, previous_VC = _id_rows(module, inputs)
    rows_VC[list(bins.ids)] += table_KC[first:-1] - table_KC[-1]
    phases = len(head_PH)
    importance_C = torch.cat([head_PH.abs().mean(0), torch.full((phases,), 1 / phases)])
    importance_C = importance_C.clamp_min(1e-6)
    count_V = inputs.count_V + 0.1
    own = compress(rows_VC, count_V, importance_C, id_numbers)
    previous = compress(previous_VC, count_V, importance_C, previous_numbers)
    return replace(bins, ids=()), {
        "table": torch.cat([table_KC[:first], table_KC[-1:]]),
        "head": head_PH,
        "id_codes": own.codes_VR,
        "id_weights": own.weights_RC,
        "previous_codes": previous.codes_VR,
        "previous_weights": previous.weights_RC,
    }


def _id_rows(module: RouterModule, inputs: IdInputs) -> tuple[Tensor, Tensor]:
    """What each id adds, and what it adds as the id before, float32 ``[V, C]``."""
    own_EC, previous_EC = _merged(module, module.embed_map)
    own_C, previous_C = _merged(module, module.entropy_map)
    return (
        inputs.embed_VE @ own_EC + inputs.entropy_V[:, None] * own_C,
        inputs.embed_VE @ previous_EC + inputs.previous_entropy_V[:, None] * previous_C,
    )


def _merged(module: RouterModule, columns: Tensor) -> Tensor:
    """All hidden units side by side, and the mean over members of what is added to the scores."""
    units = module.members * module.hidden
    direct = columns[..., units:].unflatten(-1, (module.members, -1)).mean(-2)
    return torch.cat([columns[..., :units], direct], -1)
