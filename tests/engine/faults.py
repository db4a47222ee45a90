"""Steps that fail, and are tried again."""

from collections.abc import Callable, Container
from typing import Any

from tokenrouter import LLM, RequestOutput


def failing(call: Callable[..., Any], *, at: Container[int]) -> Callable[..., Any]:
    """``call``, but its calls number ``at`` (from 1) raise."""
    count = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count in at:
            raise RuntimeError("injected")
        return call(*args, **kwargs)

    return wrapper


def step_to_the_end(llm: LLM) -> tuple[dict[str, RequestOutput], int]:
    """As ``run_all``, but tries a failed step again; last outputs and the number of failures."""
    last: dict[str, RequestOutput] = {}
    steps = failures = 0
    while llm.engine.has_unfinished():
        steps += 1
        assert steps < 5000, "the engine does not recover"
        try:
            outputs = llm.engine.step()
        except RuntimeError as error:
            assert "injected" in str(error)
            failures += 1
            continue
        finally:
            llm.engine.pool.check_integrity()
        for output in outputs:
            last[output.request_id] = output
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    return last, failures
