# %% [markdown]
# # A figure from run folders
#
# Tables and figures are built from run folders alone. First make some runs, with seeds as repeats:
#
# ```
# python run.py -m router=rule,random,layerwise executor=int8 seed=0,1,2
# ```

# %%
import tempfile
from pathlib import Path

from tokenrouter.evaluation.curves import Curve, Panel, Point, plot_curves
from tokenrouter.evaluation.paper.render import legend, markdown
from tokenrouter.evaluation.report import find_runs, gather, join

# %% tags=["parameters"]
RUNS = globals().get("RUNS", ["outputs/sweeps"])  # folders of runs, or patterns
FIGURE = Path(globals().get("FIGURE", None) or Path(tempfile.mkdtemp()) / "figure.png")

# %% [markdown]
# Runs that failed, have not ended or have files of another version are left out, with the reason. Repeats share a row;
# models, machines and numbers of threads stand apart.

# %%
gathered = gather(find_runs(RUNS, skip=Path("nothing")))
for left_out in gathered.left_out:
    print("left out:", left_out.path, left_out.reason)
tables = join(gathered.runs)
for joined in tables:
    print(f"\n{joined.title}\n{markdown(joined.table)}{legend(joined.table)}")

# %% [markdown]
# Accuracy loss against throughput, a point per row, with intervals where they are known.


# %%
def bounds(cell):
    return (cell.low, cell.high) if cell.is_bounded else (cell.value, cell.value)


def point(row):
    x, y = row.cells["output tok/s"], row.cells["KL mnat"]
    (x_low, x_high), (low, high) = bounds(x), bounds(y)
    return Point(x=x.value, y=y.value, low=low, high=high, x_low=x_low, x_high=x_high)


curves = [
    Curve(name=f"{row.labels[0]}, {row.labels[1]}", points=[point(row)])
    for joined in tables[:1]
    for row in joined.table.rows
    if {"output tok/s", "KL mnat"} <= row.cells.keys()
]
if not curves:
    raise ValueError(f"no run of {RUNS} has both a rate and a KL: make some with task=tradeoff")
panel = Panel(title=tables[0].title, x_label="output tok/s", curves=curves)
plot_curves([panel], FIGURE, y_label="KL mnat", caption=legend(tables[0].table), joined=False)
print("figure in", FIGURE)
