# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Figures
#
# > One style, one colour per role, in every chapter.

# %%
#| default_exp figures

# %% [markdown]
# **So far** proofs. **Now** pictures. **Why**: a reader who has learnt that the prior is grey and the posterior blue should never have to learn it again.

# %%
#| exports
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from matplotlib.axes import Axes

# %% [markdown]
# The palette is seaborn's `colorblind`. Each role of the book has one colour:

# %%
#| exports
_palette = sns.color_palette("colorblind").as_hex()
COLOUR: dict[str, str] = {
    "prior": "#7f7f7f",
    "observation": "#000000",
    "posterior": _palette[0],
    "baseline": _palette[1],
    "truth": _palette[2],
    "noise": _palette[3],
    "other": _palette[4],
}


# %%
#| exports
def use_style() -> None:
    "Set the book's plotting style: 5 × 3 inches, 110 dpi, no top or right spine."
    sns.set_theme(style="ticks", palette="colorblind", font_scale=0.9)
    plt.rcParams.update({
        "figure.figsize": (5, 3), "figure.dpi": 110, "savefig.dpi": 110, "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "figure.constrained_layout.use": True,
    })  # fmt: skip


# %%
use_style()
plt.rcParams["figure.dpi"]


# %% [markdown]
# ## A line with its band
#
# A line without a band hides what the book is about. `band` draws both, as in @fig-roles; the caption of every figure says what the band is.

# %%
#| exports
def _array(x: torch.Tensor | Sequence[float] | np.ndarray) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


# %%
#| exports
def band(
    ax: Axes,  # where to draw
    x: torch.Tensor | Sequence[float] | np.ndarray,  # horizontal positions, shape (n,)
    mean: torch.Tensor | Sequence[float] | np.ndarray,  # the line, shape (n,)
    sd: torch.Tensor | Sequence[float] | np.ndarray,  # half-width of the band, shape (n,), unit of `mean`
    role: str = "posterior",  # key of `COLOUR`
    label: str | None = None,
) -> None:
    "A line and the band mean ± sd in the colour of its role; `KeyError` for an unknown role."
    x, mean, sd = _array(x), _array(mean), _array(sd)
    ax.plot(x, mean, color=COLOUR[role], label=label)
    ax.fill_between(x, mean - sd, mean + sd, color=COLOUR[role], alpha=0.2, linewidth=0)


# %%
#| label: fig-roles
#| fig-cap: "The mean of n readings settles while its standard deviation (band) falls as one over the root of n."
#| code-fold: true
n = torch.arange(1, 41)
readings = torch.randn(40, generator=torch.Generator().manual_seed(0))
fig, ax = plt.subplots()
ax.plot(n, readings, "x", color=COLOUR["observation"], label="observation")
band(ax, n, readings.cumsum(0) / n, n**-0.5, "posterior", "posterior ± 1 sd")
ax.axhline(0, color=COLOUR["truth"], linestyle="--", label="truth")
ax.set(xlabel="readings", ylabel="value [h]", ylim=(-2.4, 3))
ax.legend(loc="upper left", ncols=3)
plt.show()

# %% [markdown]
# ## Summary
#
# - `use_style` is called once at the top of a chapter.
# - Colours mean roles: grey prior, black observation, blue posterior, orange baseline, green truth.
# - `band` draws a mean with its uncertainty.
#
# ## Exercises
#
# **1.** Which colour would a second baseline have?
#
# <details><summary>Answer</summary>
#
# The role `other`:

# %%
COLOUR["other"]

# %% [markdown]
# </details>
