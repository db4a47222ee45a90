"""The features and their extractor."""

from dataclasses import replace

import pytest
import torch

from tokenrouter.features import (
    FEATURES,
    FeatureExtractor,
    TokenTypeTable,
    check_features,
    sequence_batch,
    static,
)
from tokenrouter.types import Phase

TABLE = TokenTypeTable.from_texts([None, "\n", "7", "The", " the", " river"])
EXPECTED = {
    "position": [0, 1, 2, 3, 4],
    "distance_to_prompt_end": [2, 1, 0, -1, -2],
    "is_decode": [0, 0, 0, 1, 1],
    "token_type": [4, 1, 4, 7, 1],
    "line_start": [1, 0, 1, 0, 0],
    "repeats": [0, 0, 1, 0, 1],
}


@pytest.mark.parametrize("name", FEATURES)
def test_values(name: str) -> None:
    """Guards each feature's meaning; a new feature must come with its values here."""
    batch = sequence_batch([3, 1, 3, 5, 1], prompt_len=3)
    value_T = FEATURES[name].compute(batch, TABLE)
    assert value_T.dtype == torch.float32
    assert value_T.tolist() == EXPECTED[name]
    assert FEATURES[name].low <= value_T.min() and value_T.max() <= FEATURES[name].high
    assert FEATURES[name].name == name


def test_columns_are_in_the_order_asked_for() -> None:
    """Guards against a router that reads another feature's column."""
    batch = sequence_batch([3, 1, 3, 5, 1], prompt_len=3)
    names = tuple(reversed(FEATURES))
    inputs = FeatureExtractor(names, TABLE).extract(batch)
    assert inputs.values_TF.shape == (5, len(names)) and inputs.names == names
    for name in names:
        assert inputs.feature(name).tolist() == EXPECTED[name], name
    assert inputs.prefix_hash_T is batch.prefix_hash_T


def test_no_names_and_no_tokens() -> None:
    """Guards against a crash on routers without features and on steps without undecided tokens."""
    batch = sequence_batch([3, 1])
    none_T = batch.select(torch.empty(0, dtype=torch.int64))
    assert FeatureExtractor((), TABLE).extract(batch).values_TF.shape == (2, 0)
    assert FeatureExtractor(tuple(FEATURES), TABLE).extract(none_T).values_TF.shape == (0, 6)
    with pytest.raises(ValueError, match="was not asked for"):
        FeatureExtractor((), TABLE).extract(batch).feature("position")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("position", "entropy"), "no feature entropy; features: position, distance_to_prompt_end"),
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
    monkeypatch.setattr(static, "FEATURES", {**FEATURES, spec.name: spec})
    return spec.name


def test_a_feature_is_refused_where_it_does_not_exist(decode_only: str) -> None:
    """Guards against a declared phase that nobody looks at: values made up for a whole prompt."""

    def check(*phases: Phase, point: str = "pre_forward") -> None:
        names = ("position", decode_only)
        check_features(names, phases=phases, decision_point=point, who="mine")  # type: ignore[arg-type]

    check(Phase.DECODE)
    message = (
        "router mine asks for decode_only, which does not exist in {} at pre_forward; "
        "features there: position, distance_to_prompt_end"
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
