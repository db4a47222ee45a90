"""Guards the sampler: independence of batch mates, ties, extreme options, broken logits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.draws import Drawer, sample
from tokenrouter.engine.sampler import Sampler
from tokenrouter.kernels import Cut, KernelSet, ReferenceKernels, select
from tokenrouter.sampling_params import SamplingParams

NO_EOS: frozenset[int] = frozenset()


def draw_seeded(logits_TV: Tensor, params: SamplingParams, kernels: KernelSet) -> list[int]:
    """Tokens of a request that runs alone; row t of the logits is its t-th step."""
    sampler, state = Sampler(logits_TV.shape[1], 99, kernels), Drawer(params, [1, 2])
    drawn = []
    for t in range(len(logits_TV)):
        drawn.append(int(sample(sampler, logits_TV[t : t + 1], [state], NO_EOS).ids_B))
        state.advance(drawn[-1])
    return drawn


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}])
def test_a_seeded_request_does_not_see_its_batch_mates(
    options: dict[str, Any], backend: str
) -> None:
    """Shared noise, or noise by batch position, makes a seed worthless in continuous batching."""
    steps, vocab, kernels = 12, 700, select(backend)
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(steps, vocab, generator=generator) * 2
    params = SamplingParams(seed=7, temperature=1.3, **options)
    alone = draw_seeded(logits_TV, params, kernels)
    assert len(set(alone)) > 3

    others = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, top_k=600),
        SamplingParams(top_p=0.99, temperature=5.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2),
    ]
    for place in (0, 2, 5):
        sampler, mine = Sampler(vocab, place, kernels), Drawer(params, [1, 2])
        states = [Drawer(other, [3]) for other in others]
        states.insert(place, mine)
        drawn = []
        for t in range(steps):
            rows = torch.randn(len(states), vocab, generator=generator)
            rows[place] = logits_TV[t]
            now = range(len(states)) if t % 3 else [place]  # batch mates come and go
            ids = sample(sampler, rows[list(now)], [states[i] for i in now], NO_EOS).ids_B
            for i, token in zip(now, ids.tolist(), strict=True):
                states[i].advance(token)
            drawn.append(int(ids[list(now).index(place)]))
        assert drawn == alone


def test_seeds_of_completions_and_of_the_engine() -> None:
    """Equal completions for n > 1, or runs that do not repeat."""
    row = torch.zeros(1, 1000)
    sampler = Sampler(1000, seed=0)

    def first(seed: int, index: int) -> int:
        state = Drawer(SamplingParams(seed=seed), [1], index=index)
        return int(sample(sampler, row, [state], NO_EOS).ids_B)

    assert len({first(5, index) for index in range(8)}) > 5
    assert first(5, 1) == first(6, 0)
    assert first(2**63 - 1, 1) == first(0, 0)
    draws = [
        sample(Sampler(1000, seed=s), row, [Drawer(SamplingParams(), [1])], NO_EOS).ids_B
        for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    unseeded = [Drawer(SamplingParams(), [1]) for _ in range(8)]
    assert len(set(sample(sampler, row.expand(8, -1), unseeded, NO_EOS).ids_B.tolist())) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_not_modified(dtype: torch.dtype) -> None:
    """The engine hands the same logits to evaluation, and prompt_logprobs."""
    logits_BV = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits_BV.clone()
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {3: 5.0}, "logprobs": 1},
        {},
        {"seed": 1, "top_k": 5},
        {"top_p": 0.5, "repetition_penalty": 2.0},
        {"min_p": 0.5, "min_tokens": 2},
        {"temperature": 0.5, "frequency_penalty": 1.0},
    ]
    for some in (options, options[2:3] * 7, options[:1] * 7, options[3:4] * 7):
        states = [Drawer(SamplingParams(**o), [1, 2]) for o in some]
        sample(Sampler(50, seed=0), logits_BV, states, frozenset({0}))
        assert torch.equal(logits_BV, before)


def test_penalties_of_many_rows_stay_in_their_rows() -> None:
    """A flat update with wrong row numbers penalises a neighbour."""
    logits_BV = torch.tensor([[3.0, 2.9, 0.0]]).repeat(4, 1)
    states = [
        Drawer(SamplingParams(temperature=0.0), [0]),
        Drawer(SamplingParams(temperature=0.0, repetition_penalty=1.1), [0]),
        Drawer(SamplingParams(temperature=0.0, frequency_penalty=0.1), [0]),
        Drawer(SamplingParams(temperature=0.0, presence_penalty=0.2), [0]),
    ]
    sampler = Sampler(3, seed=0)
    assert sample(sampler, logits_BV, states, NO_EOS).ids_B.tolist() == [0, 1, 0, 0]
    for state in states:
        state.advance(0)
    assert sample(sampler, logits_BV, states, NO_EOS).ids_B.tolist() == [0, 1, 0, 1]
    states[2].advance(0)
    assert sample(sampler, logits_BV, states, NO_EOS).ids_B.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_min_tokens_bans_eos_and_stop_ids_until_then(temperature: float) -> None:
    """An answer of zero tokens although the user asked for two."""
    logits_1V = torch.tensor([[50.0, 40.0, 0.0, 10.0, 20.0]])
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=[1, 77], seed=1)
    state, sampler, drawn = Drawer(params, [3]), Sampler(5, seed=0), []
    for _ in range(4):
        drawn.append(int(sample(sampler, logits_1V, [state], frozenset({0})).ids_B))
        state.advance(drawn[-1])
    assert drawn == [4, 4, 0, 0]


def test_logit_bias_moves_the_argmax() -> None:
    """A bias that reaches only the random path."""
    logits_BV = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    params = SamplingParams(temperature=0.0, logit_bias={0: 2.5, 2: -100})
    states = [Drawer(params, [1]), Drawer(SamplingParams(temperature=0.0), [1])]
    assert sample(Sampler(3, seed=0), logits_BV, states, NO_EOS).ids_B.tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {0: 0.0}},
        {"top_k": 1},
        {"top_p": 1e-4},
        {"top_p": 1e-4, "seed": 5},
        {"temperature": 3.0, "top_k": 1, "seed": 5},
    ],
)
def test_ties_go_to_the_lowest_id(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In bf16 the two best logits are often equal: "greedy" must not be a coin toss there."""
    logits_BV = torch.randn(6, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits_BV[:, [390, 17, 201]] = 9.0
    states = [Drawer(SamplingParams(**options), [1]) for _ in range(6)]
    assert sample(Sampler(400, seed=0), logits_BV, states, NO_EOS).ids_B.tolist() == [17] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1.1e-5, "top_p": 0.9},
        {"temperature": 1e-4, "top_k": 50, "min_p": 0.1},
        {"temperature": 1e300, "top_k": 1},
        {"min_p": 1.0},
        {"temperature": 1e-4, "repetition_penalty": 1e-300},
    ],
)
def test_extreme_options_stay_finite(options: dict[str, Any]) -> None:
    """Logits over a tiny temperature overflow to inf, and inf - inf is NaN."""
    logits_BV = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 40
    logits_BV[:, 8] = -math.inf
    states = [Drawer(SamplingParams(**options), [int(row.argmax())]) for row in logits_BV]
    ids_B = sample(Sampler(300, seed=0), logits_BV, states, NO_EOS).ids_B
    assert torch.equal(ids_B, logits_BV.argmax(dim=-1))


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9999}, {"min_p": 1e-6}])
@pytest.mark.parametrize(("number", "best"), [(0.0, 1), (1 - 2**-53, 2)])
def test_the_ends_of_the_random_range(
    number: float, best: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number 0 would draw a masked first token, one next to 1 a masked last one: EOS as first token."""
    monkeypatch.setattr(
        Sampler, "_uniform", lambda *_: torch.full((1,), number, dtype=torch.float64)
    )
    state = Drawer(SamplingParams(min_tokens=1, **options), [0])
    logits_1V = torch.tensor([[9.0, 1.0, 0.5, 9.0]])
    for kernels in (ReferenceKernels(), select("native")):
        sampled = sample(Sampler(4, 0, kernels), logits_1V, [state], frozenset({0, 3}))
        assert sampled.ids_B.tolist() == [best]


class Recorder(ReferenceKernels):
    """Keeps the logits that tokens are drawn from."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def draw(self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
        self.drawn.append(x_TV)
        return super().draw(x_TV, inverse_temperature_T, uniform_T)

    def draw_cut(
        self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor, cut: Cut
    ) -> Tensor:
        self.drawn.append(x_TV)
        return super().draw_cut(x_TV, inverse_temperature_T, uniform_T, cut)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}])
def test_plain_rows_are_drawn_from_the_models_own_logits(options: dict[str, Any]) -> None:
    """A float32 copy of [B, V] costs more than the draw."""
    kernels, logits_BV = Recorder(), torch.randn(4, 50).bfloat16()
    params = [SamplingParams(**options, **o) for o in ({}, {"seed": 1}, {"temperature": 0.5})]
    states = [Drawer(p, [1]) for p in params * 2]
    sample(Sampler(50, 0, kernels), logits_BV, states[:4], NO_EOS)
    assert [x.data_ptr() for x in kernels.drawn] == [logits_BV.data_ptr()]
    states[1] = Drawer(SamplingParams(temperature=0.0), [1])
    sample(Sampler(50, 0, kernels), logits_BV, states[:4], NO_EOS)
    assert kernels.drawn[1].dtype == torch.bfloat16 and kernels.drawn[1].shape == (3, 50)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {2: 1.0}},
        {},
        {"seed": 1},
        {"top_k": 3},
        {"top_p": 0.5, "seed": 2},
        {"min_p": 0.5},
    ],
)
def test_a_broken_row_is_named(bad: float, options: dict[str, Any]) -> None:
    """argmax of NaN is an id like any other: garbage would stream to the user."""
    logits_BV = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    if bad == -math.inf:
        logits_BV[2] = bad
    else:
        logits_BV[2, 5] = bad
    mates: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.3}, options, {}]
    states = [Drawer(SamplingParams(**o), [1]) for o in mates]
    with pytest.raises(RuntimeError, match="row 2 of the batch"):
        sample(Sampler(10, seed=0), logits_BV, states, NO_EOS)


def test_a_request_that_bans_everything_is_named() -> None:
    """The mask of min_tokens can leave nothing."""
    state = Drawer(SamplingParams(min_tokens=1, stop_token_ids=[0, 1]), [1])
    with pytest.raises(RuntimeError, match="min_tokens leave no token"):
        sample(Sampler(3, seed=0), torch.zeros(1, 3), [state], frozenset({2}))


def test_wrong_shapes_are_refused() -> None:
    """A row too many would be dropped silently."""
    with pytest.raises(ValueError, match=r"\[1, 4\], got \[2, 4\]"):
        sample(Sampler(4, seed=0), torch.zeros(2, 4), [Drawer(SamplingParams(), [1])], NO_EOS)
