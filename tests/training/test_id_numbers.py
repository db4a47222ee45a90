"""What is known of ids before labels, its compression, and networks of several members. V vocabulary, E hidden size."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.router_sets import FEATURES, TABLE, VOCAB_SIZE, write_set
from tokenrouter.features import FeatureExtractor, sequence_batch
from tokenrouter.kernels import ReferenceKernels
from tokenrouter.routers.lookup import Bins, router_table
from tokenrouter.training.entropies import Entropies
from tokenrouter.training.id_inputs import IdInputs, make_id_inputs
from tokenrouter.training.losses import mean_gain
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.router_tensors import compress, router_tensors
from tokenrouter.training.train import TrainOptions, _module, train

EMBED_VE = torch.randn(VOCAB_SIZE, 8, generator=torch.Generator().manual_seed(0))
UNSEEN = 50  # ids from here on are in no statistics


def statistics(num_tokens: int = 20_000) -> Entropies:
    """Text whose entropies are a linear function of the embedding, 2 more behind id 3, 1 more where 5 came before."""
    draw = torch.Generator().manual_seed(1)
    ids_N = torch.randint(0, UNSEEN, (num_tokens,), generator=draw)
    previous_N = torch.cat([torch.tensor([-1]), ids_N[:-1]])
    unit_VE = EMBED_VE / EMBED_VE.square().mean(1, keepdim=True).sqrt()
    entropy_N = 3 + 0.5 * unit_VE[ids_N, 0] + 2.0 * (ids_N == 3) + 1.0 * (previous_N == 5)
    return Entropies(ids_N=ids_N, previous_N=previous_N, entropy_N=entropy_N)


def score(
    bins: Bins, tensors: dict[str, Tensor], values_NF: Tensor, ids_N: Tensor, phase_N: Tensor
) -> Tensor:
    """As a router scores."""
    table = router_table(bins, tensors)
    return ReferenceKernels().router_mlp(values_NF, ids_N, phase_N, table)


def test_entropies_are_expected_from_what_was_seen_and_from_embeddings() -> None:
    """Guards against numbers of another id, and against zeros for ids that the statistics do not hold."""
    inputs = make_id_inputs(EMBED_VE, statistics())
    unit_V = inputs.embed_VE[:, 0]
    torch.testing.assert_close(inputs.embed_VE.square().mean(1), torch.ones(VOCAB_SIZE))
    assert float(torch.corrcoef(torch.stack([inputs.entropy_V, unit_V]))[0, 1]) > 0.8
    rest_V = inputs.entropy_V - 0.5 * unit_V
    assert int(rest_V.argmax()) == 3 and float(rest_V[3] - rest_V.median()) > 1.5
    assert int(inputs.previous_entropy_V.argmax()) == 5
    unseen = torch.stack([inputs.entropy_V[UNSEEN:], unit_V[UNSEEN:]])
    assert float(torch.corrcoef(unseen)[0, 1]) > 0.8
    assert inputs.count_V[UNSEEN:].sum() == 0 and inputs.count_V.sum() == 19_999


def test_a_first_token_has_no_entropy_of_the_one_before() -> None:
    """Guards against the last id of the vocabulary, which -1 would index."""
    inputs = make_id_inputs(EMBED_VE, statistics())
    found_N2 = inputs.entropies(torch.tensor([3, 4]), torch.tensor([-1, 5]))
    assert float(found_N2[0, 1]) == 0
    assert torch.equal(found_N2[:, 0], inputs.entropy_V[[3, 4]])
    assert torch.equal(found_N2[1, 1], inputs.previous_entropy_V[5])


def test_compression_finds_the_product() -> None:
    """Guards against directions in another order than the numbers, and against columns that are scaled once only."""
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(500, 3, generator=draw), torch.randn(3, 10, generator=draw)
    rows_VC, importance_C = left @ right, torch.rand(10, generator=draw) + 0.1
    codes_VR, weights_RC = compress(rows_VC, torch.rand(500) + 0.1, importance_C, 3)
    assert codes_VR.dtype == torch.int8
    error = (codes_VR.float() @ weights_RC - rows_VC).norm() / rows_VC.norm()
    assert float(error) < 0.02
    fewer = compress(rows_VC, torch.ones(500), importance_C, 1)
    coarse = (fewer.codes_VR.float() @ fewer.weights_RC - rows_VC).norm() / rows_VC.norm()
    assert 0.1 < float(coarse) < 1


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "labels", features=(*FEATURES, "previous_id"))


def with_ids(path: Path) -> RouterData:
    inputs: IdInputs = make_id_inputs(EMBED_VE, statistics())
    return RouterData(str(path), batch_size=256, id_inputs=inputs)


OPTIONS = TrainOptions(
    kind="mlp",
    hidden=6,
    members=3,
    id_numbers=8,
    previous_numbers=8,
    max_epochs=6,
    batch_size=256,
    learning_rate=0.05,
    id_shrinkage=1.0,
    embed_shrinkage=100.0,
)


def test_the_stored_network_is_the_mean_of_its_members(data_path: Path) -> None:
    """Guards against members whose units mix, and against ids that lose their own rows on the way to numbers."""
    data = with_ids(data_path)
    module = _module(data, OPTIONS, seed=0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        module.table[data.bins.first_id_row :] = (
            0.1  # equal rows: of few directions, as numbers must be
        )
        module.table[data.bins.first_id_row + 3] = 0.4
        module.entropy_map[0] = 0
    bins, tensors = router_tensors(module, data, 10, 10)
    assert bins.ids == () and tensors["id_codes"].shape == (VOCAB_SIZE, 10)
    part = data.valid
    previous_N = data.previous(part)
    with torch.no_grad():
        expected_N = module(
            data.rows(part),
            part.phase_N,
            torch.stack([part.ids_N, previous_N], 1),
            data.id_inputs.entropies(part.ids_N, previous_N),  # type: ignore[union-attr]
        ).mean(1)
    score_N = score(bins, tensors, part.values_NF, part.ids_N, part.phase_N)
    error_N = score_N - expected_N
    assert float(error_N.std() / expected_N.std()) < 0.03


def test_it_learns_with_numbers_of_ids(data_path: Path, tmp_path: Path) -> None:
    """Guards against maps that are not trained, or a router that scores by something else than it learned."""
    data = with_ids(data_path)
    trained = train(data, OPTIONS, folder=tmp_path)
    assert mean_gain(trained.score_valid_N, data.valid.label_N) > 0.7
    ids = data.valid.ids_N[:128].tolist()
    batch = sequence_batch(ids, prompt_len=64, token_types=TABLE)
    values_TF = FeatureExtractor(data.features, TABLE).extract(batch).values_TF
    score_T = score(trained.bins, trained.tensors, values_TF, batch.ids_T, batch.phase_T)
    torch.testing.assert_close(score_T, trained.score_valid_N[:128])


def test_the_feature_of_the_id_before_is_needed(data_path: Path) -> None:
    inputs = make_id_inputs(EMBED_VE, statistics())
    with pytest.raises(ValueError, match=r"needs the feature previous_id: add it to trainer.feat"):
        RouterData(str(data_path), features=["position"], id_inputs=inputs)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"members": 0}, "trainer.members=0 must be an integer of at least 1"),
        ({"id_numbers": -1}, "trainer.id_numbers=-1 must be an integer of at least 0"),
        ({"previous_numbers": 0}, "trainer.previous_numbers=0 must be an integer of at least 1"),
        ({"embed_shrinkage": -1.0}, "trainer.embed_shrinkage=-1.0 must be a number"),
        ({"kind": "linear", "members": 2}, "are of the mlp: set 0 and 1 for linear"),
        ({"kind": "trees", "id_numbers": 6}, "are of the mlp: set 0 and 1 for trees"),
    ],
)
def test_options_out_of_range_are_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**({"kind": "mlp"} | more))  # type: ignore[arg-type]
