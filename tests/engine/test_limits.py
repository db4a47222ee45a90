"""Guards the edges: exactly the chunk, exactly the pool, exactly the model's length."""

import pytest

from tests.engine.tools import greedy, plain_llm, prompts, run_all, tiny, tokens
from tokenrouter import LLM, EngineOptions, SamplingParams

LONG = (*prompts()[2], *prompts()[4], *prompts()[6])


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_prompts_around_the_chunk_size(length: int) -> None:
    """A chunk that ends exactly at the prompt's end is taken for an unfinished prompt, or for two."""
    llm = plain_llm(EngineOptions(max_num_batched_tokens=16, max_num_seqs=4))
    expected = tokens(plain_llm().generate([LONG[:length]], greedy())[0])
    (output,) = llm.generate([LONG[:length]], greedy())
    assert tokens(output) == expected
    assert llm.engine.stats.prefill_tokens == length
    assert llm.engine.stats.steps == -(-length // 16) + 11


@pytest.mark.parametrize("scheduler", ["fcfs", "static_batch"])
def test_a_request_as_large_as_the_pool(scheduler: str) -> None:
    """The last token needs no slot: one slot fewer is a refusal, exactly enough runs, alone or in a crowd."""
    options = EngineOptions(num_kv_slots=30, max_num_seqs=8, scheduler=scheduler)  # type: ignore[arg-type]
    expected = tokens(plain_llm().generate([LONG[:20]], greedy(11))[0])
    for count in (1, 5):
        llm = plain_llm(options)
        outputs = llm.generate([LONG[:20]] * count, greedy(11))
        assert [tokens(o) for o in outputs] == [expected] * count
        assert llm.engine.stats.peak_live_slots == 30
        assert llm.engine.pool.free == 30
    with pytest.raises(ValueError, match="needs up to 31 KV slots"):
        plain_llm(options).generate([LONG[:20]], greedy(12))
    (output,) = plain_llm(options).generate([LONG[:30]], greedy(1))
    assert len(tokens(output)) == 1


@pytest.mark.parametrize("name", ["kvcache.num_slots", "EngineOptions.num_kv_slots"])
def test_a_small_pool_is_refused_under_the_names_of_its_option(name: str) -> None:
    """ "raise num_kv_slots", which the command line does not have: there it is kvcache.num_slots."""
    llm = plain_llm(EngineOptions(num_kv_slots=30))
    with pytest.raises(ValueError, match=rf"lower max_tokens or raise .*{name}"):
        llm.generate([LONG[:20]], greedy(12))
    with pytest.raises(ValueError, match=rf"31 forced tokens exceed .*raise .*{name}"):
        llm.score([list(LONG[:31])], sink=lambda *_: None)


def test_a_pool_of_one_slot() -> None:
    """The smallest request in the smallest pool."""
    llm = plain_llm(EngineOptions(num_kv_slots=1, max_num_seqs=3))
    outputs = llm.generate([[5], [6], [7]], greedy(1))
    assert [len(tokens(o)) for o in outputs] == [1, 1, 1]
    with pytest.raises(ValueError, match="needs up to 2 KV slots"):
        llm.generate([[5, 6]], greedy(1))


def test_the_models_length() -> None:
    """Positions beyond the RoPE table; a prompt of the full length that leaves no room to answer."""
    model = tiny(max_model_len=40)
    llm = LLM(model)
    (output,) = llm.generate([LONG[:30]], greedy(100))
    assert len(tokens(output)) == 10
    assert output.outputs[0].finish_reason == "length"
    assert tokens(output) == tokens(plain_llm().generate([LONG[:30]], greedy(10))[0])
    (output,) = llm.generate([LONG[:39]], greedy(5))
    assert len(tokens(output)) == 1
    with pytest.raises(ValueError, match="40 tokens; the model's length is 40"):
        llm.generate([LONG[:40]], greedy(1))
    llm.score([list(LONG[:40])], sink=lambda *_: None)
    with pytest.raises(ValueError, match="41 forced tokens exceed the model's length of 40"):
        llm.score([list(LONG[:41])], sink=lambda *_: None)
    assert not llm.engine.has_unfinished()


def test_max_tokens_none_goes_up_to_the_models_length_or_the_pool() -> None:
    """No limit taken for the default of 16, for none at all, or for a refusal in a small pool."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = LLM(tiny(max_model_len=40)).generate([LONG[:7]], params)
    assert len(tokens(output)) == 33
    assert output.outputs[0].finish_reason == "length"
    small = LLM(tiny(max_model_len=40), options=EngineOptions(num_kv_slots=20))
    outputs = small.generate([LONG[:7], LONG[:20]], params)
    assert [len(tokens(o)) for o in outputs] == [14, 1]
    assert small.engine.stats.peak_live_slots == 20


def test_more_requests_than_seats() -> None:
    """Requests beyond max_num_seqs that are dropped instead of waiting; more run at once than allowed."""
    llm = plain_llm(EngineOptions(max_num_seqs=3))
    for index, prompt in enumerate(prompts()[:10]):
        llm.engine.add_request(str(index), prompt, greedy(4))
    most = 0

    def check() -> None:
        nonlocal most
        most = max(most, len(llm.engine.scheduler.running))

    assert len(run_all(llm, check)) == 10
    assert most == 3


def test_default_pool_holds_at_least_one_request_of_full_length() -> None:
    """A default of a fixed size that refuses what the model can do."""
    llm = plain_llm(EngineOptions(max_num_seqs=1))
    assert llm.engine.pool.num_slots >= tiny().config.max_model_len


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_kv_slots": 10**11},
            r"kvcache\.num_slots=100000000000 .*bytes \(.* a slot\).*num_kv_slots",
        ),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            r"scheduler\.max_num_seqs=1000000000 .*bytes \(.* a request\), and this machine has .*: set at",
        ),
    ],
)
def test_what_no_machine_holds_is_refused_before_it_is_allocated(
    options: dict[str, int], message: str
) -> None:
    """A MemoryError of an array of numpy's, or an allocator's RuntimeError, that names no option."""
    with pytest.raises(ValueError, match=message):
        plain_llm(EngineOptions(**options))  # type: ignore[arg-type]
