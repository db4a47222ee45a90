"""Guards the fusing of weights."""

import pytest
import torch

from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.models.weights import from_state_dict


@pytest.mark.parametrize(
    ("name", "left"),
    [("self_attn.k_proj.bias", "q_proj.bias"), ("mlp.gate_proj.bias", "mlp.up_proj.bias")],
)
def test_some_of_the_fused_biases_are_refused(name: str, left: str) -> None:
    """One bias of three missing, and the other two were left out in silence."""
    hf_model = tiny_hf("llama", attention_bias=True, mlp_bias=True)
    config = from_hf_model(hf_model, ByteTokenizer(), name="x").config
    state = dict(hf_model.state_dict())
    del state[f"model.layers.2.{name}"]
    table = (torch.zeros(1, 16), torch.zeros(1, 16))
    with pytest.raises(ValueError, match=rf"only model\.layers\.2\..*{left}.* of the [23] biases"):
        from_state_dict(state, config, table)
