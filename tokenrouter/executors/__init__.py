"""LEVEL 2: computes. Knows nothing of features or routers."""

from tokenrouter.executors.base import Executor
from tokenrouter.executors.pool import POOLS, ExecutorPool, PoolSpec, build_pool

__all__ = ["POOLS", "Executor", "ExecutorPool", "PoolSpec", "build_pool"]
