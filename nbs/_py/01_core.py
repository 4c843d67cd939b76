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
import math
from collections.abc import Iterable
from functools import reduce
from numbers import Integral
from typing import Any, NamedTuple

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
# A precision is kept in float32 even when the mean is bfloat16. bfloat16 has eight bits of mantissa: an update that adds less than $1/256$ of the total may be lost, and one below $1/512$ always is.

# %%
large = torch.tensor(300.0, dtype=torch.bfloat16)
large + 1 == large


# %%
#| exports
def wide_dtype(
    *tensors: Tensor,  # what is computed from
) -> torch.dtype:  # float32, or the widest among them if that is wider
    "The dtype in which precisions are kept and computed. `TypeError` for anything but tensors."
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f"a tensor is needed, got {x!r}")
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


# %%
#| exports
def at_least_float32(
    x: Float[Tensor, "..."],  # any shape and floating dtype
) -> Float[Tensor, "..."]:  # float32 if `x` was narrower, else as it was
    "`x` in its `wide_dtype`."
    dtype = wide_dtype(x)
    return x.to(dtype)


# %%
at_least_float32(large).dtype, at_least_float32(large.double()).dtype

# %% [markdown]
# An ordinary transformer carries only $h$. It is the case in which every feature is known equally well, $\lambda \equiv 1$:

# %%
#| exports
def certain(
    mean: Float[Tensor, "*batch d"],  # $h$, [h]
) -> Belief:  # λ = 1 in float32 or wider
    "The ordinary transformer's belief: precision one everywhere (the degenerate case of [@bft2026])."
    return Belief(mean, at_least_float32(torch.ones_like(mean)))


# %%
certain(torch.zeros(2, 3, dtype=torch.bfloat16)).precision.dtype

# %% [markdown]
# ## Saying no
#
# Everything after this chapter divides by a precision or takes its logarithm. A zero, negative or undefined precision is refused where a user hands it in, with a message that names it:


# %%
#| exports
def check_precision(
    lam: Float[Tensor, "..."],  # λ, any shape
    name: str = "precision",  # what the message calls it
) -> None:
    "Raise `ValueError` unless every entry is positive and finite (λ is an inverse variance). A compiler that traces the call leaves it out."
    if not lam.numel() or torch.compiler.is_compiling():
        return
    low, high = lam.detach().aminmax()  # NaN if one entry is; several times faster than to ask each entry
    if not bool((low > 0) & (high < torch.inf)):
        bad = ~((lam > 0) & torch.isfinite(lam))
        raise ValueError(f"{name} must be positive and finite everywhere, got {lam[bad][0].item()} ({int(bad.sum())} of {lam.numel()} entries are not)")


# %%
from fastcore.test import test_fail

# %%
check_precision(thermometers.precision)
test_fail(lambda: check_precision(torch.tensor([1.0, -2.0])), contains="got -2.0")
test_fail(lambda: check_precision(torch.tensor([float("nan")])), contains="got nan")


# %% [markdown]
# Inside a layer such a question is asked again and again. There it must cost nothing, but on an accelerator every answer has to be waited for. So a layer looks at values only where they are at hand:


# %%
#| exports
def at_hand(
    x: Tensor,  # of any dtype and shape
) -> bool:
    "Can the numbers of `x` be looked at for next to nothing? On a CPU, unless a compiler traces the call; an accelerator would have to be waited for."
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# %%
#| exports
def check_not_negative(
    x: Float[Tensor, "..."],  # any shape
    name: str,  # what the message calls it
) -> None:
    "Raise `ValueError` for a negative or undefined entry, if it is `at_hand`."
    if at_hand(x) and x.numel() and not bool(x.detach().amin() >= 0):
        raise ValueError(f"{name} must be ≥ 0 everywhere, got {x[~(x >= 0)][0].item()}")


# %%
test_fail(lambda: check_not_negative(torch.tensor([0.0, -1.0]), "process noise"), contains="got -1.0")


# %%
#| exports
def check_floating(
    name: str,  # of the argument
    x: Any,  # what was given
) -> None:
    "Raise `TypeError` unless `x` is a tensor of floating-point numbers."
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")


# %%
#| exports
def check_belief(
    belief: Belief,  # to be checked
) -> None:
    "Raise `ValueError` unless mean and precision have one shape and the precision is positive and finite, `TypeError` unless it is a Belief of floating-point tensors."
    if not isinstance(belief, Belief):
        raise TypeError(f"a Belief is needed, got {type(belief).__name__}")
    for name, x in (("mean", belief.mean), ("precision", belief.precision)):
        check_floating(name, x)
    if belief.mean.shape != belief.precision.shape:
        raise ValueError(f"mean and precision must have one shape, got {tuple(belief.mean.shape)} and {tuple(belief.precision.shape)}")
    check_precision(belief.precision)


# %%
test_fail(lambda: check_belief(Belief(torch.zeros(2), torch.ones(3))), contains="(2,) and (3,)")
check_belief(thermometers)

# %% [markdown]
# What a layer has computed is finite, unless something that went in was not, or was too large. Again the check looks at values only where that is free:


# %%
#| exports
def check_finite(
    x: Float[Tensor, "..."],  # any shape
    name: str,  # what the message calls it
) -> None:
    "Raise `ValueError` for an infinite or undefined entry, if it is `at_hand`."
    if at_hand(x) and x.numel():
        low, high = x.detach().aminmax()
        if not bool((low > -torch.inf) & (high < torch.inf)):
            raise ValueError(f"{name} must be finite, got {x[~torch.isfinite(x)][0].item()}")


# %%
test_fail(lambda: check_finite(torch.tensor([0.0, float("nan")]), "v"), contains="v must be finite, got nan")

# %% [markdown]
# Options are words, and the message for a wrong word lists the allowed ones:


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
# Numbers and switches have a range as well. A text that looks like one (`"false"`) is not accepted:


# %%
#| exports
def check_positive(
    name: str,  # of the argument
    value: Any,  # what was given
    zero: bool = False,  # may it be zero?
) -> None:
    "Raise `ValueError` unless `value` is a finite number above zero (or zero, where that is allowed)."
    number = value.detach() if isinstance(value, Tensor) else value
    try:
        fits = not isinstance(value, bool) and math.isfinite(number) and (number > 0 or zero and number == 0)
    except (TypeError, ValueError):  # a text; a tensor of several numbers
        fits = False
    if not fits:
        raise ValueError(f"{name} must be {'≥ 0' if zero else 'positive'} and finite, got {value!r}")


# %%
#| exports
def check_count(
    name: str,  # of the argument
    value: Any,  # what was given
    low: int = 1,  # the least that is allowed
) -> None:
    "Raise `TypeError` unless `value` is a whole number, `ValueError` if it is below `low`."
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")


# %%
#| exports
def check_seed(
    name: str,  # of the argument
    value: Any,  # what was given
) -> None:
    "Raise `TypeError` unless `value` is a whole number, `ValueError` outside of 0 … 2³² − 1: NumPy's generator takes no other."
    check_count(name, value, 0)
    if value >= 2**32:
        raise ValueError(f"{name} must be below 2³², got {value}")


# %%
#| exports
def check_flag(
    name: str,  # of the argument
    value: Any,  # what was given
) -> None:
    "Raise `TypeError` unless `value` is True or False."
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


# %%
test_fail(lambda: check_positive("nu0", float("inf")), contains="got inf")
test_fail(lambda: check_positive("nu0", torch.ones(2)), contains="got tensor([1., 1.])")
test_fail(lambda: check_positive("nu0", True), contains="got True")
test_fail(lambda: check_count("heads", 1.5), contains="got 1.5")
test_fail(lambda: check_seed("seed", 2**32), contains="below 2³², got 4294967296")
test_fail(lambda: check_flag("kalman", "false"), contains="got 'false'")

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
