"""A router that has learned from hidden states, from the text to the engine. N tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tasks.jobs import run_in
from tests.training.conftest import random_ids
from tests.training.router_sets import FACTS, window_rows
from tokenrouter import LLM
from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.features.base import FeatureContext
from tokenrouter.features.hidden import hidden_crest
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Budget, MLPRouter
from tokenrouter.routers.artifact import read_artifact
from tokenrouter.training.collect import CollectOptions, make_rows, stored_features
from tokenrouter.training.gradients import DifferentiableDecoder, Trace
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore
from tokenrouter.training.windows import Window
from tokenrouter.types import Phase, RouteInput


def test_from_text_to_an_engine_that_is_asked_after_a_layer(
    tmp_path: Path, model: LoadedModel, decoder: DifferentiableDecoder
) -> None:
    """Guards against hidden states of another layer in the data set than in the engine; a file that forgets which."""
    tiny = ("debug=tiny", "logger=none", f"paths.output_dir={tmp_path}")
    sizes = "collect.window_tokens=64 collect.num_tokens=512 collect.entropy_tokens=0".split()
    fisher = ("labels=fisher", "collect.after_layer=2")
    folder = run_in(tmp_path / "c", "task=collect", *fisher, *tiny, *sizes)
    data = json.loads((folder / "collected.json").read_text())["path"]
    few = ("trainer=mlp_hidden", "trainer.id_numbers=0", "trainer.max_epochs=2")
    folder = run_in(tmp_path / "t", "task=train_router", *tiny, f"train.data={data}", *few)
    path = folder / "router.json"
    assert read_artifact(path, "mlp").trained_for.after_layer == 2

    router = MLPRouter(path=str(path), budget=Budget(high_frac=0.3))
    assert router.decision_point == "after_layer_k"
    seen: list[RouteInput] = []
    score = router.score
    router.score = lambda inputs: seen.append(inputs) or score(inputs)  # type: ignore[func-returns-value,method-assign]
    texts = [random_ids(80, seed).tolist() for seed in range(20)]
    llm = LLM(model, router=router, executors="int8", calibration_ids=texts)
    seen.clear()
    llm.score(texts, sink=lambda *_: None, prefill_len=40)
    for phase in Phase:
        by_route = llm.engine.stats.requested_tokens[phase]
        work = router.high_work(torch.arange(len(by_route))).numpy() @ by_route
        assert 0.2 < work / by_route.sum() < 0.4

    seen.clear()
    llm.score(texts[:1], sink=lambda *_: None, prefill_len=40)
    shown_N = torch.cat([inputs.feature("hidden_crest") for inputs in seen])
    batch = sequence_batch(texts[0])
    batch = replace(batch, hidden_TE=decoder.trace(batch.ids_T).inputs[2])
    types = TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size)
    expected_N = hidden_crest(batch, FeatureContext(types=types))
    torch.testing.assert_close(shown_N, expected_N, atol=1e-3, rtol=1e-3)


def test_a_window_runs_once_for_all_of_its_features(
    decoder: DifferentiableDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a forward for the logits and another for the hidden states."""
    trace, num_traces = DifferentiableDecoder.trace, 0

    def counting(self: DifferentiableDecoder, ids_N: torch.Tensor) -> Trace:
        nonlocal num_traces
        num_traces += 1
        return trace(self, ids_N)

    def no_labels(decoder: DifferentiableDecoder, ids_N: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.zeros(len(ids_N), 1)

    monkeypatch.setattr(DifferentiableDecoder, "trace", counting)
    types = TokenTypeTable.from_tokenizer(decoder.model.tokenizer, decoder.config.vocab_size)
    window = Window(
        text="drawn",
        split="train",
        number=0,
        ids_N=random_ids(40),
        document_N=torch.zeros(40, dtype=torch.int64),
        prompt_len=20,
        seed=0,
    )
    names = ("position", "hidden_rms", "surprise")
    for given, expected in ((names, 1), (names[:1], 0)):
        num_traces = 0
        after_layer = int("hidden_rms" in given)
        rows = make_rows(window, no_labels, decoder, given, types, after_layer)  # type: ignore[arg-type]
        assert num_traces == expected and rows.features_NF.shape == (40, len(given))
    square_N = trace(decoder, window.ids_N).inputs[1].square().mean(1)
    rows = make_rows(window, no_labels, decoder, names, types, 1)  # type: ignore[arg-type]
    torch.testing.assert_close(rows.features_NF[:, 1], square_N.sqrt())
    assert rows.features_NF[20:].isfinite().all() and rows.features_NF[:20, 2].isnan().all()


def test_only_layers_after_the_decision_count(tmp_path: Path) -> None:
    """Guards against a label of layers that run high whatever the answer."""
    sums = []
    for number, facts in enumerate((FACTS, FACTS | {"after_layer": 1})):
        store = LabelStore(tmp_path / str(number))
        store.open(facts)
        for split in ("train", "valid"):
            store.write(f"{split}-drawn-00000", window_rows(0, split))
        sums.append(RouterData(str(store.path)).train.label_N)
    label_N2 = window_rows(0, "train").label_NC
    assert torch.allclose(sums[0], label_N2.sum(1)) and torch.allclose(sums[1], label_N2[:, 1])


@pytest.mark.parametrize("after_layer", [-1, 1.5, True])
def test_layers_are_counted(after_layer: object) -> None:
    """Guards against half a layer."""
    with pytest.raises(ValueError, match=r"collect\.after_layer=.* must be an integer"):
        CollectOptions(num_tokens=8, window_tokens=8, after_layer=after_layer)  # type: ignore[arg-type]


def test_what_exists_only_there_says_so(tmp_path: Path) -> None:
    """Guards against a hidden state that no layer has made yet, and one that leaves nothing to decide."""
    assert "hidden_crest" in stored_features(None, after_layer=1)
    with pytest.raises(
        ValueError, match=r"hidden_crest cannot be stored.*set collect\.after_layer"
    ):
        stored_features(["hidden_crest"])
    sizes = ("collect.window_tokens=64", "collect.num_tokens=64", "collect.after_layer=99")
    with pytest.raises(ValueError, match=r"after_layer=99 leaves none of the model's \d+ layers"):
        run_in(tmp_path, "task=collect", "debug=tiny", "logger=none", *sizes)
