"""Guards what is refused: by name, with what is supported, and from the config before any weight is read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models.tools import change_config, save_model, save_tokenizer
from tokenrouter.models import SUPPORTED, load_model, tiny_random

ALL_SUPPORTED = ".*".join(SUPPORTED)
ROPE = {"rope_theta": 1e4}
LONGROPE = {
    **ROPE,
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 1024,
}
PER_LAYER_TYPE = {
    "full_attention": {**ROPE, "rope_type": "default"},
    "sliding_attention": {**ROPE, "rope_type": "default"},
}
REMOTE = {"AutoConfig": "code.NewConfig", "AutoModelForCausalLM": "code.NewLM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    places = {
        family: tmp_path_factory.mktemp(family) for family in ("llama", "mistral", "qwen2", "qwen3")
    }
    for family, folder in places.items():
        biases = {"attention_bias": True} if family == "llama" else {}
        save_model(folder, family, **biases)
    return places


OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'; supported: silu"),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, "'longrope'; supported: default, linear"),
    "old rope_scaling": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {**LONGROPE, "type": "longrope"}},
        "'longrope'; supported: default, linear",
    ),
    "rope per layer type": (
        "qwen3",
        {"rope_parameters": PER_LAYER_TYPE},
        r"rope_parameters per layer type \(full_attention, sliding_attention\); supported: one",
    ),
    "rope without its factor": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "linear"}},
        "'linear'.*factor",
    ),
    "partial rotary": (
        "llama",
        {"partial_rotary_factor": 0.5},
        r"partial_rotary_factor 0\.5; supported: 1\.0",
    ),
    "gptq": (
        "llama",
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config of the method 'gptq'; supported",
    ),
    "fp8": (
        "qwen3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config of the method 'fp8'; supported",
    ),
    "layer types": (
        "qwen2",
        {"layer_types": ["full_attention", "linear_attention"] * 2},
        "linear_attention; supported: full_attention, sliding_attention",
    ),
    "window of no size": ("mistral", {"sliding_window": 0}, "sliding_window 0 must be at least 1"),
    "slides without a window": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 4},
        "sliding_attention, but no sliding_window",
    ),
    "key heads": ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads 3 must divide"),
    "unknown type": ("llama", {"model_type": "new", "architectures": ["NewLM"]}, "NewLM.*'new'.*"),
    "unknown type without a name": (
        "llama",
        {"model_type": "new", "architectures": None},
        "model_type 'new'.*",
    ),
    "mixture of experts": (
        "mistral",
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        "MixtralForCausalLM.*",
    ),
    "two names that disagree": ("llama", {"model_type": "gemma"}, "LlamaForCausalLM.*'gemma'.*"),
    "another head": (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification.*",
    ),
    "code of its own": (
        "llama",
        {"model_type": "new", "architectures": ["NewLM"], "auto_map": REMOTE},
        "NewLM.*'new'.*",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused_before_the_weights(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Minutes of loading before the refusal: here no weights are there to load, and none are asked for."""
    family, values, message = OPTIONS[name]
    folder = shutil.copytree(folders[family], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    change_config(folder, **values)
    supported = ALL_SUPPORTED if message.endswith(".*") else ""
    with pytest.raises(ValueError, match=f"(?s)({message}){supported}"):
        load_model(str(folder))


@pytest.mark.parametrize("limit", [0, -1, 4097])
def test_a_limit_is_refused_before_the_weights(
    folders: dict[str, Path], tmp_path: Path, limit: int
) -> None:
    """The limit was read from the loaded model."""
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"max_model_len {limit} must lie in 1 \.\. 4096"):
        load_model(str(folder), max_model_len=limit)


def test_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    """A traceback from the depths, or a model that is loaded and computes nonsense."""
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300, bos_token_id=1, eos_token_id=2)
    ).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"GPT2LMHeadModel.*supported.*{ALL_SUPPORTED}"):
        load_model(str(tmp_path))


def drop_tensors(*names: str) -> Callable[[Path], object]:
    def drop(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        for name in names:
            del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return drop


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
        (cut_weights, "unreadable"),
        (
            drop_tensors("model.layers.1.mlp.down_proj.weight"),
            r"no tensor model\.layers\.1\.mlp\.down_proj\.weight",
        ),
        (
            lambda f: change_config(f, intermediate_size=96),
            r"(down|gate|up)_proj\.weight .*its config asks for",
        ),
        (lambda f: change_config(f, num_hidden_layers=5), r"no tensor model\.layers\.4"),
        (lambda f: change_config(f, num_hidden_layers=3), r"has tensor model\.layers\.3"),
        (
            lambda f: change_config(f, attention_bias=False),
            r"has tensor model\.layers\.0\.self_attn\.k_proj\.bias.*no use",
        ),
    ],
    ids=[
        "config",
        "empty config",
        "no weights",
        "cut weights",
        "no tensor",
        "another size",
        "more layers",
        "fewer layers",
        "biases that are not used",
    ],
)
def test_a_spoilt_folder_is_refused(
    folders: dict[str, Path], tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    """Errors of every kind from below; random numbers for a missing tensor; tensors that are left out in silence."""
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    spoil(folder)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_model(str(folder))


def test_a_folder_of_gguf_files_says_what_to_do(tmp_path: Path) -> None:
    """A folder as downloaded, without the name of one of its files."""
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"no config\.json.*gguf_file: b\.gguf"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"gguf_file 'a\.gguf' names another"):
        load_model(str(tmp_path / "b.gguf"), gguf_file="a.gguf")


def test_tiny_random_refuses_another_family() -> None:
    """A typo gives a model of another family."""
    with pytest.raises(ValueError, match="family 'gpt2'; families: llama, mistral, qwen2, qwen3"):
        tiny_random("gpt2")
