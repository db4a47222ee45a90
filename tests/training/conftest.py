"""A tiny model, its decoder and a text, shared by the tests of this folder."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokenrouter.kernels import ReferenceKernels
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.low_path import PlainLow


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A text of given documents."""

    name: str = "made_up"
    texts: tuple[str, ...] = ()

    def documents(self) -> list[str]:
        return list(self.texts)


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_random()


@pytest.fixture(scope="session")
def decoder(model: LoadedModel) -> DifferentiableDecoder:
    return DifferentiableDecoder(model, PlainLow(model=model), ReferenceKernels())


@pytest.fixture(scope="session")
def ids_N() -> Tensor:
    return random_ids(80)


@pytest.fixture(scope="session")
def documents() -> Documents:
    """Sixty documents of which every fourth is learned from."""
    return Documents(
        texts=tuple(f"{i} " + "The river ran 7 miles.\n" * (i % 5 + 3) for i in range(60))
    )


def random_ids(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed))
