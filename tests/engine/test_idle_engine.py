"""Memory of an engine without requests goes back to the system, and the host tier's counters are the engine's."""

from tests.engine.tools import greedy, tiny
from tokenrouter import LLM, EngineOptions


def test_an_engine_that_goes_idle_gives_its_memory_back() -> None:
    """Slots of ended requests kept their pages until another run had made 256 steps."""
    engine = LLM(tiny(), options=EngineOptions(num_kv_slots=4000, max_num_seqs=2)).engine
    prompt = [3 + i % 200 for i in range(700)]
    for name in ("a", "b"):
        engine.add_request(name, prompt, greedy(4))
    while engine.has_unfinished():
        engine.step()
    assert engine.pool.num_touched == 0 and engine.stats.num_compactions == 1


def test_memory_stays_while_requests_wait() -> None:
    """Pages given back between two requests of a queue, and taken again at once."""
    engine = LLM(tiny(), options=EngineOptions(num_kv_slots=4000, max_num_seqs=1)).engine
    for name in ("a", "b"):
        engine.add_request(name, [3 + i % 200 for i in range(1100)], greedy(4))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats.num_compactions == 1


def test_an_abort_of_the_last_request_gives_memory_back() -> None:
    """No step comes after it that could."""
    engine = LLM(tiny(), options=EngineOptions(num_kv_slots=4000)).engine
    engine.add_request("a", [3 + i % 200 for i in range(1400)], greedy(9))
    for _ in range(4):
        engine.step()
    engine.abort("a", silent=True)
    assert engine.pool.num_touched == 0


def test_the_engine_counts_its_host_tiers_swaps() -> None:
    """Counters of a pass only, so that ``engine.stats`` said 0 outside of a measurement."""
    engine = LLM(tiny(), options=EngineOptions(num_host_slots=100)).engine
    assert engine.scheduler.host is not None
    assert engine.stats.swaps is engine.scheduler.host.counts
