"""A decode head that looks at the logits before a token, from the text to the engine. N tokens."""

import json
from pathlib import Path

import pytest
import torch

from tests.tasks.jobs import run_in
from tests.training.conftest import random_ids
from tests.training.router_sets import FACTS, FEATURES, TABLE, window_rows
from tokenrouter import LLM
from tokenrouter.features import TextSignals, sequence_batch
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Budget, LinearRouter, MLPRouter, TreesRouter
from tokenrouter.routers.artifact import Kind, write_artifact
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.training.entropies import previous_logits
from tokenrouter.training.export import make_artifact
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore, WindowRows
from tokenrouter.training.train import TrainOptions, train
from tokenrouter.types import Phase, RouteInput

WITH_ENTROPY = (*FEATURES, "entropy")
ROUTERS: dict[Kind, type[LearnedRouter]] = {
    "mlp": MLPRouter,
    "linear": LinearRouter,
    "trees": TreesRouter,
}


def unsure_rows(number: int, split: str) -> WindowRows:
    """A window whose decode tokens need the high path where the logits before them were unsure."""
    rows = window_rows(number, split)
    draw = torch.Generator().manual_seed(2000 + number)
    entropy_N = torch.rand(len(rows.label_NC), generator=draw) * 6
    is_decode_N = rows.columns["phase"] == Phase.DECODE
    need_N = torch.where(is_decode_N, entropy_N.exp(), 1.0)
    values = torch.where(is_decode_N, entropy_N, torch.nan)
    return WindowRows(
        text=rows.text,
        split=rows.split,
        window=number,
        prompt_len=rows.prompt_len,
        columns=rows.columns,
        features_NF=torch.cat([rows.features_NF, values[:, None]], 1),
        label_NC=rows.label_NC * need_N[:, None],
    )


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = LabelStore(tmp_path_factory.mktemp("set") / "labels")
    store.open(FACTS | {"features": list(WITH_ENTROPY)})
    for split, count in (("train", 24), ("valid", 4)):
        for number in range(count):
            store.write(f"{split}-drawn-{number:05d}", unsure_rows(number, split))
    return store.path


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_decode_head_follows_the_entropy_and_the_prefill_head_does_not(
    data_path: Path, tmp_path: Path, kind: Kind
) -> None:
    """Guards against NaN in the weights, and against a head that never learns from what prompt tokens lack."""
    data = RouterData(str(data_path), batch_size=256)
    trained = train(data, TrainOptions(kind=kind, max_epochs=12), folder=tmp_path)
    artifact = make_artifact(data, trained, layers=None, about={})
    router = ROUTERS[kind](path=str(write_artifact(artifact, tmp_path / "r.json")))
    entropy_N = torch.rand(200, generator=torch.Generator().manual_seed(5)) * 6
    ids = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(6)).tolist()

    def scores(prompt_len: int, shift: float) -> torch.Tensor:
        batch = sequence_batch(ids, prompt_len=prompt_len, token_types=TABLE)
        signals = TextSignals(TABLE, {"entropy": (entropy_N + shift) % 6})
        extractor = router.extractor(TABLE, signals)
        return router.score(extractor.extract(batch))

    score_N = scores(1, 0)
    assert score_N.isfinite().all()
    assert float(torch.corrcoef(torch.stack([score_N, entropy_N])[:, 1:])[0, 1]) > 0.6
    assert torch.equal(scores(200, 0), scores(200, 3))


def test_without_decode_tokens_the_feature_is_refused(tmp_path: Path) -> None:
    """Guards against bins cut from no values."""
    store = LabelStore(tmp_path)
    store.open(FACTS | {"features": list(WITH_ENTROPY)})
    for split in ("train", "valid"):
        rows = unsure_rows(0, split)
        rows.columns["phase"].fill_(int(Phase.PREFILL))
        store.write(f"{split}-drawn-00000", rows)
    with pytest.raises(ValueError, match="feature entropy exists for none of the 128 train tokens"):
        RouterData(str(tmp_path))
    assert len(RouterData(str(tmp_path), features=FEATURES).train) == 128


def test_thresholds_that_only_an_engine_can_set_are_refused(
    data_path: Path, tmp_path: Path
) -> None:
    """Guards against a task that loads a model first, and then says that prompt tokens have no entropy."""
    data = RouterData(str(data_path), batch_size=256)
    trained = train(data, TrainOptions(kind="linear", max_epochs=1), folder=tmp_path)
    artifact = make_artifact(data, trained, layers=None, about={})
    path = write_artifact(artifact, tmp_path / "router")
    tiny = ("debug=tiny", "logger=none")
    with pytest.raises(ValueError, match="router linear looks at entropy, which"):
        run_in(tmp_path / "run", "task=calibrate", "router=linear", f"router.path={path}", *tiny)


def test_from_text_to_an_engine_that_routes_by_it(
    tmp_path: Path, model: LoadedModel, decoder: DifferentiableDecoder
) -> None:
    """Guards the documented commands: features of text other than those that an engine shows, a budget of one phase."""
    tiny = ("debug=tiny", "logger=none", f"paths.output_dir={tmp_path}")
    sizes = "collect.window_tokens=64 collect.num_tokens=512 collect.entropy_tokens=0".split()
    folder = run_in(tmp_path / "c", "task=collect", "labels=own_kl", *tiny, *sizes)
    data = json.loads((folder / "collected.json").read_text())["path"]
    few = ("trainer=mlp_logits", "trainer.id_numbers=0", "trainer.max_epochs=2")
    folder = run_in(tmp_path / "t", "task=train_router", *tiny, f"train.data={data}", *few)
    router = MLPRouter(path=str(folder / "router.json"), budget=Budget(high_frac=0.3))
    texts = [random_ids(80, seed).tolist() for seed in range(20)]
    llm = LLM(model, router=router, executors="int8", calibration_ids=texts)
    assert set(router.thresholds) == set(Phase)
    llm.score(texts, sink=lambda *_: None, prefill_len=40)
    for phase in Phase:
        by_route = llm.engine.stats.requested_tokens[phase]
        assert 0.2 < by_route[0] / by_route.sum() < 0.4

    seen: list[RouteInput] = []
    score = router.score
    router.score = lambda inputs: seen.append(inputs) or score(inputs)  # type: ignore[func-returns-value,method-assign]
    with pytest.warns(UserWarning, match="its tokens run on 'high'"):
        LLM(model, router=router).score([texts[0]], sink=lambda *_: None, prefill_len=40)
    expected = previous_logits(decoder, decoder.trace(torch.tensor(texts[0])))
    for name, expected_N in expected.items():
        shown_N = torch.cat([inputs.feature(name) for inputs in seen])
        assert shown_N[:40].isnan().all()
        torch.testing.assert_close(shown_N[40:], expected_N[40:], atol=1e-3, rtol=1e-3)
