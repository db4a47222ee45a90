"""What a router should learn: one file per label maker, ``conf/labels`` has one config for each."""

from tokenrouter.training.labels.base import Kind, LabelMaker
from tokenrouter.training.labels.first_order import FirstOrder
from tokenrouter.training.labels.fisher import Fisher
from tokenrouter.training.labels.future_attention import FutureAttention
from tokenrouter.training.labels.leave_one_out import LeaveOneOut
from tokenrouter.training.labels.own_kl import OwnKL
from tokenrouter.training.labels.own_loss import OwnLoss

__all__ = [
    "FirstOrder",
    "Fisher",
    "FutureAttention",
    "Kind",
    "LabelMaker",
    "LeaveOneOut",
    "OwnKL",
    "OwnLoss",
]
