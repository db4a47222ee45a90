"""The features and their extractor."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from tokenrouter.features import (
    FEATURES,
    FeatureContext,
    FeatureExtractor,
    Signals,
    TextSignals,
    TokenTypeTable,
    check_features,
    of_one_phase,
    registry,
    sequence_batch,
    where_they_exist,
)
from tokenrouter.features.errors import NUM_ID_BUCKETS, id_buckets
from tokenrouter.features.signals import LOGIT_SIGNALS, ROW_SIGNALS
from tokenrouter.features.uncertainty import uncertainty
from tokenrouter.types import Phase, TokenBatch

HIDDEN_TE = torch.tensor([[1, -1, 1, 1], [0, 0, -4, 0], [4, 2, 0, 0], [0] * 4, [-3] * 4])
TABLE = TokenTypeTable.from_texts([None, "\n", "7", "The", " the", " river"])
IDS = [3, 1, 3, 0, 1]
EXPECTED = {
    "position": [0, 1, 2, 3, 4],
    "position_in_prompt": [0, 1 / 3, 2 / 3, 1, 4 / 3],
    "position_in_turn": [0, 1, 2, 0, 1],
    "distance_to_prompt_end": [2, 1, 0, -1, -2],
    "is_decode": [0, 0, 0, 1, 1],
    "token_type": [4, 1, 4, 0, 1],
    "previous_token_type": [8, 4, 1, 4, 0],
    "previous_id": [-1, 3, 1, 3, 0],
    "line_start": [1, 0, 1, 0, 0],
    "log_frequency": [-math.log(4), -math.log(2), -math.log(4), 0, -math.log(2)],
    "id_bucket": [166, 55, 166, 0, 55],
    "repeats": [0, 0, 1, 0, 1],
    "repeats_log": [0, 0, math.log(2), 0, math.log(2)],
    "entropy": [0.5, 1.5],
    "margin": [0.25, 0.75],
    "top1": [0.5, 0.875],
    "surprise": [2.5, 0.125],
    "received": [0.5, 0.75],
    "received_decayed": [0.625, 0.5],
    "sink_share": [0.25, 0.125],
    "last_row_entropy": [1.25, 2.5],
    "error_history": [3, 2, 3, 8 / 3, 2],  # of id 3, of id 1, and of all for a type without any
    "queue_depth": [7] * 5,
    "pool_use": [0.25] * 5,
    "hidden_rms": [1, 2, 5**0.5, 0, 3],
    "hidden_crest": [1, 2, 4 / 5**0.5, 0, 1],
    "hidden_kurtosis": [1, 4, (4**4 + 2**4) / 4 / 25, 0, 1],
}
"""Per feature its values for the tokens of ``IDS`` behind a prompt of three where it exists: all, or the last two."""


def sequence() -> TokenBatch:
    return sequence_batch(IDS, prompt_len=3, token_types=TABLE)


def where_it_exists(name: str) -> TokenBatch:
    """The tokens of the phases that the feature has; each in a row of its own, as rows know one token."""
    batch = sequence()
    hidden_TE = HIDDEN_TE.bfloat16() if name.startswith("hidden") else None
    batch = replace(batch, row_T=torch.arange(len(batch)), hidden_TE=hidden_TE)
    phases = torch.tensor(sorted(FEATURES[name].phases))
    return batch.select(torch.isin(batch.phase_T, phases).nonzero().flatten())


def signals() -> Signals:
    """As an engine would have written them."""
    known = Signals(5, TABLE)
    values = {name: torch.tensor(EXPECTED[name]) for name in ROW_SIGNALS}
    known.write(torch.tensor([3, 4]), torch.tensor([3, 4]), values)
    known.queue_depth, known.pool_use = 7, 0.25
    known.record_error(torch.tensor([3, 3, 1]), torch.tensor([2.0, 4.0, 2.0]))
    return known


CONTEXT = FeatureContext(types=TABLE, signals=signals())


@pytest.mark.parametrize("name", FEATURES)
def test_values(name: str) -> None:
    """Guards each feature's meaning; a new feature must come with its values here."""
    value_T = FEATURES[name].compute(where_it_exists(name), CONTEXT)
    assert value_T.shape == (len(EXPECTED[name]),)
    assert value_T.tolist() == pytest.approx(EXPECTED[name])
    assert FEATURES[name].low <= value_T.min() and value_T.max() <= FEATURES[name].high
    assert FEATURES[name].name == name


def test_columns_are_in_the_order_asked_for() -> None:
    """Guards against a router that reads another feature's column."""
    batch = sequence()
    names = tuple(name for name in reversed(FEATURES) if not FEATURES[name].needs_signals)
    inputs = FeatureExtractor(names, TABLE).extract(batch)
    assert inputs.values_TF.shape == (5, len(names)) and inputs.names == names
    assert inputs.values_TF.dtype == torch.float32 and inputs.values_TF.t().is_contiguous()
    for name in names:
        assert inputs.feature(name).tolist() == pytest.approx(EXPECTED[name]), name
    assert inputs.prefix_hash_T is batch.prefix_hash_T


def test_no_names_and_no_tokens() -> None:
    """Guards against a crash on routers without features and on steps without undecided tokens."""
    batch = sequence_batch([3, 1])
    none_T = batch.select(torch.empty(0, dtype=torch.int64))
    assert FeatureExtractor((), TABLE).extract(batch).values_TF.shape == (2, 0)
    none_T = replace(none_T, hidden_TE=torch.empty(0, 4))
    everything = FeatureExtractor(tuple(FEATURES), TABLE, signals())
    assert everything.extract(none_T).values_TF.shape == (0, len(FEATURES))
    with pytest.raises(ValueError, match="was not asked for"):
        FeatureExtractor((), TABLE).extract(batch).feature("position")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("position", "doubt"), "no feature doubt; features: position, position_in_prompt"),
        (("position", "position"), "asked for twice: position, position"),
    ],
)
def test_features_that_do_not_exist_are_refused(names: tuple[str, ...], message: str) -> None:
    """Guards against zeros fed where a feature is missing."""
    with pytest.raises(ValueError, match=message):
        FeatureExtractor(names, TABLE)


@pytest.fixture
def decode_only(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a feature that does not exist inside a prompt."""
    spec = replace(FEATURES["repeats"], name="decode_only", phases=frozenset({Phase.DECODE}))
    monkeypatch.setattr(registry, "FEATURES", {**FEATURES, spec.name: spec})
    return spec.name


def test_a_feature_is_refused_where_it_does_not_exist(decode_only: str) -> None:
    """Guards against a declared phase that nobody looks at: values made up for a whole prompt."""

    def check(*phases: Phase, point: str = "pre_forward") -> None:
        names = ("position", decode_only)
        check_features(names, phases=phases, decision_point=point, who="mine")  # type: ignore[arg-type]

    check(Phase.DECODE)
    message = (
        "router mine asks for decode_only, which does not exist in {} at pre_forward; "
        "features there: position, position_in_prompt"
    )
    with pytest.raises(ValueError, match=message.format("prefill")):
        check(Phase.PREFILL)
    with pytest.raises(ValueError, match=message.format("prefill and decode")):
        check(*Phase)
    with pytest.raises(ValueError, match=r"asks for position, decode_only, .* at after_draft"):
        check(Phase.DECODE, point="after_draft")


def test_a_feature_is_not_computed_where_it_does_not_exist(decode_only: str) -> None:
    """Guards callers that never declared their phases: zeros, or values without a meaning."""
    extractor = FeatureExtractor((decode_only,), TABLE)
    batch = sequence_batch([3, 1, 3, 5, 1], prompt_len=3)
    decode = batch.select(torch.tensor([3, 4]))
    assert extractor.extract(decode).feature(decode_only).tolist() == [0, 1]
    with pytest.raises(ValueError, match="decode_only does not exist for prefill tokens"):
        extractor.extract(batch)


def test_an_optional_feature_is_nan_where_it_does_not_exist(decode_only: str) -> None:
    """Guards a decode head beside one for prompts: zeros for a prompt's tokens, or values in another token's place."""
    extractor = FeatureExtractor(("position", decode_only), TABLE, optional={decode_only})
    batch = sequence_batch([3, 1, 3, 5, 1], prompt_len=3)
    for index_T in (torch.arange(5), torch.tensor([4, 0, 3, 2]), torch.tensor([1, 2])):
        found = extractor.extract(batch.select(index_T))
        assert found.feature("position").tolist() == index_T.tolist()
        expected_T = torch.tensor([math.nan] * 3 + [0.0, 1.0])[index_T]
        assert_close(found.feature(decode_only), expected_T, equal_nan=True)
    names = ("position", decode_only)
    assert of_one_phase(names) == {decode_only}
    assert where_they_exist(names, batch.phase_T).tolist() == [[True, i > 2] for i in range(5)]


def test_signals_of_a_text_are_those_of_each_position() -> None:
    """Guards labels of text: a number of another token, or one made up where none is known."""
    known = TextSignals(TABLE, {"entropy": torch.tensor([math.nan, 1, 2, 3, 4])})
    batch = sequence_batch(IDS, prompt_len=1, row=3, token_types=TABLE)
    extractor = FeatureExtractor(("entropy",), TABLE, known)
    newest_first = batch.select(torch.tensor([4, 1, 3]))
    assert extractor.extract(newest_first).feature("entropy").tolist() == [4, 1, 3]
    decode = batch.select(torch.arange(1, 5))
    with pytest.raises(
        ValueError, match=r"feature margin is not known of text .*known are: entropy"
    ):
        FeatureExtractor(("margin",), TABLE, known).extract(decode)
    first = replace(batch, phase_T=torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="entropy is not known for the token at position 0"):
        extractor.extract(first)


def test_signals_are_refused_outside_an_engine() -> None:
    """Guards calibration and labels on text: zeros, or a crash, where no engine ran the tokens."""
    extractor = FeatureExtractor(("surprise",), TABLE)
    with pytest.raises(ValueError, match="surprise is known only while an engine runs the tokens"):
        extractor.extract(where_it_exists("surprise"))


def test_turns_are_refused_where_special_tokens_are_not_known() -> None:
    """Guards against one turn from the request's start in training, and real turns in serving."""
    batch = sequence_batch(IDS, prompt_len=3)
    with pytest.raises(ValueError, match=r"position_in_turn needs .*token_types="):
        FeatureExtractor(("position_in_turn",), TABLE).extract(batch)


def test_id_buckets_are_filled_evenly() -> None:
    """Guards against a hash that leaves buckets empty, or maps neighbours of an id to one bucket."""
    counts = id_buckets(torch.arange(49152)).bincount(minlength=NUM_ID_BUCKETS)
    assert len(counts) == NUM_ID_BUCKETS
    assert counts.min() > 0.5 * counts.float().mean() and counts.max() < 2 * counts.float().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uncertainty_is_that_of_the_softmax(dtype: torch.dtype) -> None:
    """Guards against rows mixed up between blocks of rows, NaN from tokens without probability, and bfloat16 sums."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = (torch.randn(150, 1000, generator=generator) * 4).to(dtype)
    logits_RV[3, 100:] = -math.inf
    ids_R = torch.randint(0, 100, (150,), generator=generator)
    p_RV = logits_RV.double().softmax(-1)
    best_R2 = p_RV.sort(descending=True).values[:, :2]
    expected = {
        "entropy": -torch.special.xlogy(p_RV, p_RV).sum(-1),
        "margin": best_R2[:, 0] - best_R2[:, 1],
        "top1": best_R2[:, 0],
        "surprise": -p_RV[torch.arange(150), ids_R].log(),
    }
    found = uncertainty(logits_RV, ids_R, LOGIT_SIGNALS)
    for name in LOGIT_SIGNALS:
        assert_close(found[name], expected[name].float(), rtol=1e-4, atol=1e-5)
        alone = uncertainty(logits_RV, ids_R, [name])
        assert list(alone) == [name] and torch.equal(alone[name], found[name])
