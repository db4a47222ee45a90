"""Guards what is read from a config besides weights: windows per layer, lengths, head sizes."""

import pytest
import torch
import transformers as hf

from tokenrouter.models import rope
from tokenrouter.models.config import ModelConfig, from_hf


def read(config: object, max_model_len: int | None = None) -> ModelConfig:
    return from_hf(config, max_model_len=max_model_len, eos_token_ids=frozenset())


def test_windows_per_layer() -> None:
    """Qwen2 slides in the upper layers only, and only when told to; a window as long as the model is none."""
    sliding = {"sliding_window": 50, "max_window_layers": 2, "num_hidden_layers": 4}
    qwen2 = hf.Qwen2Config(**sliding, use_sliding_window=True)
    assert read(qwen2).windows == (None, None, 50, 50)
    assert read(hf.Qwen2Config(**sliding)).windows == (None,) * 4
    mistral = hf.MistralConfig(num_hidden_layers=2, sliding_window=4096)
    assert read(mistral).windows == (4096, 4096)
    assert read(mistral, max_model_len=4096).windows == (None, None)
    assert read(hf.MistralConfig(num_hidden_layers=2, sliding_window=None)).windows == (None, None)


def test_dynamic_rope_ends_at_the_trained_length() -> None:
    """Beyond it the frequencies would change with the sequence, under entries that are already stored."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = hf.LlamaConfig(
        max_position_embeddings=4096,
        rope_parameters={**rope, "original_max_position_embeddings": 1024},
    )
    assert read(config).max_model_len == 1024
    with pytest.raises(ValueError, match=r"max_model_len 2000 must lie in 1 \.\. 1024"):
        read(config, max_model_len=2000)


def test_head_size_and_key_heads_have_defaults() -> None:
    """Old configs name neither."""
    config = hf.LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=None)
    config.head_dim = None
    read_config = read(config)
    assert (read_config.head_dim, read_config.num_kv_heads, read_config.kv_planes) == (16, 6, 12)


def test_windows_of_options_that_a_family_does_not_read() -> None:
    """Llama has none, whatever its config says; Mistral's switch and layer types are Qwen's."""
    assert read(hf.LlamaConfig(num_hidden_layers=1, sliding_window=20)).windows == (None,)
    assert read(hf.LlamaConfig(num_hidden_layers=1, sliding_window="none")).windows == (None,)
    mistral = hf.MistralConfig(
        num_hidden_layers=1,
        sliding_window=20,
        use_sliding_window=False,
        layer_types=["full_attention"],
    )
    assert read(mistral).windows == (20,)


def test_an_odd_head_size_is_refused() -> None:
    """The RoPE table would be one column short."""
    config = hf.LlamaConfig()
    config.head_dim = 7
    with pytest.raises(ValueError, match="head_dim 7 must be even"):
        read(config)


def test_rope_parameters_per_layer_type_are_refused() -> None:
    """The nested form has no rope_type of its own and passed as the default one."""
    config = hf.LlamaConfig()
    config.rope_parameters = {"full_attention": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ValueError, match=r"per layer type \(full_attention\); supported: one"):
        read(config)


def test_a_rope_type_without_its_parameters_is_named() -> None:
    """A KeyError from the depths for a config that was changed in memory."""
    config = hf.LlamaConfig()
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"type 'yarn' lack a parameter.*factor"):
        rope.tables(config, head_dim=128, max_len=8, dtype=torch.float32)
