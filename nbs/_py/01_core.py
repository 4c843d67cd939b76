# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Beliefs
#
# > A belief is a mean and a precision; every block of the library takes one and returns one.

# %%
#| default_exp core

# %% [markdown]
# **So far** the notation table fixed the letters. **Now** the two letters that travel together, $h$ and $\lambda$, become one Python value.
# **Why**: data that always flow as a pair should be passed as a pair, so that no block can forget the precision.

# %%
#| exports
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# %% [markdown]
# ## The smallest case
#
# Two thermometers report 20.0 °C and 20.4 °C. The first has a standard deviation of 0.5 °C, the second of 0.1 °C.
# A belief stores the *precision*, the inverse variance, in units of °C⁻²:

# %%
temperature = torch.tensor([20.0, 20.4])
precision = torch.tensor([0.5, 0.1]) ** -2
precision


# %% [markdown]
# ## The pair
#
# A token's belief has one precision per feature of the residual stream: $h_t \in \mathbb{R}^d$, $\lambda_t \in \mathbb{R}^d_{>0}$. The paper defines this state [@bft2026].

# %%
#| exports
class Belief(NamedTuple):
    "A diagonal Gaussian: what is known of each token, and how well [@bft2026]."

    mean: Float[Tensor, "*batch d"]  # $h$, [h]
    precision: Float[Tensor, "*batch d"]  # $\lambda$, inverse variance, [h⁻²]


# %%
thermometers = Belief(temperature, precision)
thermometers.precision


# %% [markdown]
# An ordinary transformer carries only $h$. It is the case in which every feature is known equally well, $\lambda \equiv 1$:

# %%
#| exports
def certain(
    mean: Float[Tensor, "*batch d"],  # $h$, [h]
) -> Belief:  # λ = 1 in float32 or wider
    "The ordinary transformer's belief: precision one everywhere (the degenerate case of [@bft2026])."
    return Belief(mean, torch.ones_like(mean, dtype=torch.promote_types(mean.dtype, torch.float32)))


# %%
certain(torch.zeros(2, 3, dtype=torch.bfloat16)).precision.dtype


# %% [markdown]
# The precision stays in float32 even when the mean is bfloat16: bfloat16 has eight bits of mantissa, and an update that adds less than $1/256$ of the total is lost.

# %%
large = torch.tensor(300.0, dtype=torch.bfloat16)
large + 1 == large

# %% [markdown]
# ## Saying no
#
# Everything after this chapter divides by a precision or takes its logarithm. Zero, negative or undefined precision is refused where a user hands it in, by name:


# %%
#| exports
def check_precision(
    lam: Float[Tensor, "..."],  # λ, any shape
    name: str = "precision",  # what the message calls it
) -> None:
    "Raise `ValueError` unless every entry is positive and finite (λ is an inverse variance)."
    bad = ~((lam > 0) & torch.isfinite(lam))
    if bad.any():
        raise ValueError(f"{name} must be positive and finite everywhere, got {lam[bad][0].item()} ({int(bad.sum())} of {lam.numel()} entries are not)")


# %%
from fastcore.test import test_fail

# %%
check_precision(thermometers.precision)
test_fail(lambda: check_precision(torch.tensor([1.0, -2.0])), contains="got -2.0")
test_fail(lambda: check_precision(torch.tensor([float("nan")])), contains="got nan")


# %%
#| exports
def check_belief(
    belief: Belief,  # to be checked
) -> None:
    "Raise `ValueError` unless mean and precision have one shape and the precision is positive and finite."
    if belief.mean.shape != belief.precision.shape:
        raise ValueError(f"mean and precision must have one shape, got {tuple(belief.mean.shape)} and {tuple(belief.precision.shape)}")
    check_precision(belief.precision)


# %%
test_fail(lambda: check_belief(Belief(torch.zeros(2), torch.ones(3))), contains="(2,) and (3,)")
check_belief(thermometers)

# %% [markdown]
# Options are words, and a wrong word is answered with the right ones:


# %%
#| exports
def check_option(
    name: str,  # of the argument
    value: str,  # what was given
    allowed: Iterable[str],  # what may be given
) -> None:
    "Raise `ValueError` unless `value` is one of the allowed words."
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


# %%
test_fail(lambda: check_option("impl", "fused", ["explicit", "blocked"]), contains="'explicit', 'blocked', got 'fused'")

# %% [markdown]
# ## Summary
#
# - A `Belief` is a mean and an elementwise precision of the same shape.
# - The ordinary transformer is the belief with precision one.
# - Precision lives in float32 and is checked where it enters.
#
# ## Exercises
#
# **1.** How large must $\lambda$ be before `float32` loses an update of one unit?
#
# <details><summary>Answer</summary>
#
# At $2^{24}$, where neighbouring numbers are two apart:

# %%
torch.tensor(2.0**24) + 1 == torch.tensor(2.0**24)

# %% [markdown]
# </details>
