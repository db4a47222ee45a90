"""A tiny model with a full and an int8 path, shared by the tests of this folder."""

import pytest

from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.models import LoadedModel, tiny_random


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_random()


@pytest.fixture(scope="session")
def int8_pool(model: LoadedModel) -> ExecutorPool:
    return build_pool("int8", model)
