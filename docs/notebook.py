# %% [markdown]
"""
# A grid from a notebook

Open this file as a notebook (Jupytext, VS Code, PyCharm) or run it as a script: `python docs/notebook.py`. It posts a
small grid to the service at `TTSV_URL` (`make serve`), follows it, and turns the results into a table and a figure.
"""

# %%
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from service.client import Client

# %% [markdown]
# ## Post
#
# TT ranks with and without clipping, two seeds each. Had the answer been lost on the way, sending it again would store
# it once: the client gives every post a key of its own.

# %%
spec: dict[str, Any] = {
    "name": "from a notebook",
    "tags": ["notebook"],
    "base": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "constraint": "clip",
        "clipping": {"every": 20},
        "training": {"epochs": 4, "lr": 0.1},
    },
    "grid": {"rank": [4, 16], "delta": [None, 2.0], "seed": [0, 1]},
}
with Client() as client:
    posted = client.submit(spec)
print(f"experiment {posted.id}: {posted.trial_count} trials")

# %% [markdown]
# ## Follow
#
# `watch` gives the experiment again whenever it changed, until it is final.

# %%
with Client() as client:
    for experiment in client.watch(posted.id):
        progress = experiment.progress
        print(f"{experiment.state.value}: {progress.epochs_done} of {progress.epochs} epochs")

# %% [markdown]
# ## A table
#
# One row per trial: the configuration's fields, the state, every metric.

# %%
with Client() as client:
    frame = client.results(posted.id)
table = frame.groupby(["rank", "delta"], dropna=False)[["accuracy", "ece", "max_singular_value", "compression"]].mean()
print(table.round(3).to_string())

# %% [markdown]
# ## A figure
#
# What clipping does to the largest singular value, and what it costs.

# %%
figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
for delta, group in frame.groupby("delta", dropna=False):
    label = "no delta" if pd.isna(delta) else f"delta {delta!r}"
    axes.scatter(group["max_singular_value"], 100 * group["accuracy"], label=label)
axes.set_xlabel("largest singular value (periodic)")
axes.set_ylabel("test accuracy (%)")
axes.legend()
figure.savefig("notebook.png", dpi=150)
