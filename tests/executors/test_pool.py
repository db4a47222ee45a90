"""Guards the pool: which paths it has, and what it refuses."""

import pytest

from tokenrouter.executors import POOLS, PoolSpec, build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.int8_weight import Int8WeightExecutor
from tokenrouter.models import tiny_random


def test_named_pools() -> None:
    """A name whose paths changed behind the back of configs and tables."""
    model = tiny_random("llama", num_hidden_layers=1)
    full, int8, shared, weight, int4 = (
        build_pool(name, model) for name in ("full", "int8", "int8_shared", "int8_weight", "int4")
    )
    assert {path: type(e) for path, e in full.executors.items()} == {"high": FullExecutor}
    assert {path: type(e) for path, e in int8.executors.items()} == {
        "high": FullExecutor,
        "low": Int8Executor,
    }
    assert {path: type(e) for path, e in shared.executors.items()} == {
        "high": Int8WeightExecutor,
        "low": Int8Executor,
    }
    assert weight.description == "high=full, low=int8_weight, lm_head=high"
    assert int4.description == "high=full, low=int4, lm_head=high" and int4.low_name == "int4"
    assert full.description == "high=full, lm_head=high"
    assert int8.description == "high=full, low=int8, lm_head=high"
    assert shared.description == "high=int8_weight, low=int8, lm_head=high"


def test_unknown_pool_lists_the_choices() -> None:
    """A typo on the command line."""
    with pytest.raises(ValueError, match=f"'int2'.*{', '.join(POOLS)}"):
        build_pool("int2", tiny_random("llama", num_hidden_layers=1))


def test_lm_head_is_checked() -> None:
    """An option without effect that is taken silently."""
    with pytest.raises(ValueError, match="lm_head='middle' must be high or low"):
        PoolSpec(lm_head="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no effect without a low executor"):
        PoolSpec(lm_head="low")
    assert PoolSpec(low=Int8Executor, lm_head="low").lm_head == "low"
