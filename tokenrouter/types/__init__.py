"""The values that cross folders: what a step's tokens are, what a router sees and answers, what a route is.

Imports torch only. Every other folder may import this one; it imports none of them.
"""

from tokenrouter.types.forward import AttentionBatch, ForwardBatch, KVAccess, Segment
from tokenrouter.types.routes import Attention, Branch, LayerSpan, Retention, Route, RouteTable
from tokenrouter.types.sparse import BlockMeans, SparseAttention, SparseRows
from tokenrouter.types.tokens import Phase, RouteInput, RoutingDecision, StepFeedback, TokenBatch

__all__ = [
    "Attention",
    "AttentionBatch",
    "BlockMeans",
    "Branch",
    "ForwardBatch",
    "KVAccess",
    "LayerSpan",
    "Phase",
    "Retention",
    "Route",
    "RouteInput",
    "RouteTable",
    "RoutingDecision",
    "Segment",
    "SparseAttention",
    "SparseRows",
    "StepFeedback",
    "TokenBatch",
]
