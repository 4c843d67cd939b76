# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention observes
#
# > One function, `observe`, turns queries, keys, values and reliabilities into a belief about what each token saw.

# %%
#| default_exp attention

# %% [markdown]
# **So far** Part I gave every piece for one neighbourhood: kriging weights (chapter 10), the observation precision they earn (chapter 11).
# **Now** all neighbourhoods of a sequence are computed at once, as self-attention: the paper's reading of attention as kriging **[P]**, with the observation precision of chapter 11 **[D]**.
# **Why** a chapter of its own: written down naively, the weights are a $T\times T$ table per head, and so are their squares. The same numbers can be had in memory that grows with $T$, not $T^2$, and this chapter climbs there on a ladder of two rungs: first the explicit form, because it can be read; then the blocked form, checked against the explicit one in value and gradient.

# %%
#| exports
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bft_nb.core import check_finite, check_flag, check_floating, check_option, check_positive, check_precision, wide_dtype
from bft_nb.kriging import kriging_mean, kriging_variance, kriging_weights
from bft_nb.reml import common_value, observation_variance, scatter

# %%
import matplotlib.pyplot as plt
import sympy as sp
from fastcore.test import test_fail

from bft_nb.figures import COLOUR, band, use_style
from bft_nb.symbolic import assert_same, prove

# %%
use_style()

# %% [markdown]
# ## The smallest case
#
# Three tokens look at three tokens. Relevance is equal (all queries are zero), but the second token is unreliable: its reliability $\bar\lambda$, the mean of its precision over features, is a tenth of the others'. Axes are those of chapter 00: (batch, head, token, feature).

# %%
q = torch.zeros(1, 1, 3, 2)
k = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(0))
v = torch.tensor([[[[1.0, 0.0], [9.0, 0.0], [1.0, 0.0]]]])
lam_bar = torch.tensor([[1.0, 0.1, 1.0]])

# %% [markdown]
# Plain attention averages the three values and gets $11/3$. Kriging weighs them by reliability:

# %%
w = kriging_weights(q @ k.mT, lam_bar[:, None])
w[0, 0, 0], kriging_mean(w, v)[0, 0, 0]

# %% [markdown]
# ## Which keys may be seen
#
# A mask follows torch's `scaled_dot_product_attention`: boolean, `True` where a query may look at a key, of any shape that broadcasts to $(b, h, t, j)$; `is_causal` adds the lower triangle. Padding is a real mask: chapter 10 showed that a tiny precision is not one.
# The number of visible keys is needed twice: for rows that see nothing, and for the precision-weights reading of chapter 11. Counting them needs no $T\times T$ table unless the mask is one.


# %%
#| exports
def visible_keys(
    mask: Bool[Tensor, "#b #h #t j"] | None,  # True where a query may look at a key
    is_causal: bool,  # query t sees keys j ≤ t only
    queries: int,  # T
    keys: int,  # number of keys, seen or not
) -> Int[Tensor, "#b #h t"]:
    "How many keys each query may look at."
    if mask is None:
        return (torch.arange(1, queries + 1) if is_causal else torch.full((queries,), keys))[None, None]
    if not is_causal:
        return mask.sum(-1).expand(*mask.shape[:2], queries)
    if mask.shape[-2] == 1:
        return mask.squeeze(-2).cumsum(-1)
    return mask.tril().sum(-1)


# %%
padded = torch.tensor([[False, True, True]])[:, None, None, :]
visible_keys(padded, True, 3, 3)

# %% [markdown]
# The first query of this left-padded sequence sees no key at all. What does attention observe there? Nothing, and "nothing" has a precise form in this book **[D]**: an observation of precision (almost) zero, which the Kalman update then ignores.

# %%
#| exports
NO_EVIDENCE = 1e30  # variance of an observation that saw no key: finite, so that gradients stay finite


# %% [markdown]
# ## First rung: explicit weights
#
# All that chapters 10 and 11 need from the weights is four moments per query: the estimate of chapter 10, (11.1), (10.6) and (10.7):
#
# $$e_t = \sum_j w_{tj} v_j,\qquad S_t = \sum_j w_{tj} v_j^2 - e_t^2,\qquad s^2_{0,t} = \sum_j \frac{w_{tj}}{\bar\lambda_j},\qquad \kappa_t = \sum_j w_{tj}^2 . \tag{20.1}$$

# %%
#| exports
class Moments(NamedTuple):
    "What one pass over the kriging weights yields, equation (20.1)."

    e: Float[Tensor, "b h t k"]  # kriging mean, [v]
    scatter: Float[Tensor, "b h t r"]  # S, [v²]; r = k (diagonal) or 1 (isotropic)
    s2_0: Float[Tensor, "b h t"]  # variance the tracked precision claims, [v²]
    kappa: Float[Tensor, "b h t"]  # κ = 1/n_eff, in (0, 1], [1]


# %% [markdown]
# $S$ comes in two resolutions **[D]**. `diagonal` keeps one $S$ per value dimension; `isotropic` keeps their mean, one number per head, for models whose width makes `diagonal` too costly.

# %%
#| exports
def moments_explicit(
    q: Float[Tensor, "b h t k"],  # queries, already scaled
    k: Float[Tensor, "b h j k"],  # keys
    v: Float[Tensor, "b h j kv"],  # values, [v]
    lam_bar: Float[Tensor, "b #h j"],  # λ̄ > 0, [h⁻²]
    mask: Bool[Tensor, "#b #h #t j"] | None,  # True where a query may look at a key
    bias: Float[Tensor, "#b #h #t j"] | None,  # added to the logits
    is_causal: bool,  # query t sees keys j ≤ t only
    diagonal: bool,  # S per value dimension, or its mean
) -> Moments:
    "Equation (20.1) with every weight in memory: the oracle, and the version to read."
    logits = q @ k.mT
    if bias is not None:
        logits = logits + bias
    if is_causal:
        triangle = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = triangle if mask is None else mask & triangle
    w = kriging_weights(logits, lam_bar, mask)
    s = scatter(w, v, shift=v.new_zeros(1, 1))
    return Moments(kriging_mean(w, v), s if diagonal else s.mean(-1, keepdim=True), kriging_variance(w, lam_bar), w.square().sum(-1))


# %%
tiny = moments_explicit(q, k, v, lam_bar[:, None], None, None, False, True)
tiny.e[0, 0, 0], tiny.scatter[0, 0, 0], tiny.s2_0[0, 0, 0], 1 / tiny.kappa[0, 0, 0]

# %% [markdown]
# The effective sample size is 2.2 of three keys: the unreliable token hardly counts.
#
# ## Second rung: blocks, and recomputing
#
# Three facts remove the table.
#
# 1. *The moments are one matrix product.* Append $v^2$ and $1/\bar\lambda$ to the values, $V^+ = [v,\, v^2,\, 1/\bar\lambda]$: then $w V^+$ holds $e$, $\sum w v^2$ and $s_0^2$. Likewise $\log\bar\lambda$ is one more column of the keys, multiplied by a constant 1 in the queries.
# 2. *A block of queries needs only its own rows of $w$.* Rows are computed, used and dropped.
# 3. *The backward pass can compute the rows again.* With $G^+$ the gradient of the loss $L$ with respect to $wV^+$ and $g_\kappa$ that with respect to $\kappa$, the gradient with respect to the logits $\ell$ is
#
# $$\frac{\partial L}{\partial \ell_{tj}} = w_{tj}\Big( \underbrace{G^+_t \cdot V^+_j + 2 g_{\kappa,t}\, w_{tj}}_{\partial L/\partial w_{tj}} - c_t\Big),\qquad c_t = G^+_t\cdot (wV^+)_t + 2 g_{\kappa,t}\,\kappa_t . \tag{20.2}$$
#
# The proof is the softmax Jacobian, here for the first of three keys (the others are the same by symmetry). The loss has the gradient $g$ with respect to one moment $\sum_j w_j u_j$, where $u$ is a column of $V^+$, and $g_\kappa$ with respect to $\kappa$:

# %%
l1, l2, l3, u1, u2, u3, g, gk = sp.symbols("l1:4 u1:4 g g_kappa", real=True)
total = sum(sp.exp(x) for x in (l1, l2, l3))
W = [sp.exp(x) / total for x in (l1, l2, l3)]
moment, kappa = sum(a * b for a, b in zip(W, (u1, u2, u3))), sum(a**2 for a in W)

# %%
c = g * moment + 2 * gk * kappa
claimed = W[0] * (g * u1 + 2 * gk * W[0] - c)
prove(sp.diff(g * moment + gk * kappa, l1) - claimed)

# %% [markdown]
# Now the code, in the same letters. One helper computes the rows of a block; the forward and the backward pass both use it:

# %%
#| exports
HIDDEN = -1e30  # logit of a key that must not be seen: finite, so that a row without keys stays finite


# %%
#| exports
def rows_of_weights(
    q: Float[Tensor, "*batch t k"],  # scaled
    k: Float[Tensor, "*batch j k"],
    mask: Bool[Tensor, "*#batch #t j"] | None,  # True = may be seen
    bias: Float[Tensor, "*#batch #t j"] | None,  # added to the logits: log λ̄
    is_causal: bool,
    lo: int,  # first query
    hi: int,  # the one after the last
) -> Float[Tensor, "*batch r keys"]:  # r = hi − lo; keys: all, or hi if causal
    "Kriging weights (10.2) of queries lo … hi − 1, and of no others."
    keys = hi if is_causal else k.shape[-2]
    logits = q[..., lo:hi, :] @ k[..., :keys, :].mT
    if bias is not None:
        logits += bias[..., lo if bias.shape[-2] > 1 else 0 : hi, :keys]
    if mask is not None:
        logits.masked_fill_(~mask[..., lo if mask.shape[-2] > 1 else 0 : hi, :keys], HIDDEN)
    if is_causal:
        upper = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu_(1)
        logits[..., lo:].masked_fill_(upper, HIDDEN)
    return torch.softmax(logits, -1)


# %%
#| exports
def _forward_blocks(q, k, values, mask, bias, is_causal: bool, block: int) -> tuple[Tensor, Tensor]:
    "w V⁺ and κ = Σ w², one block of queries at a time."
    out, kappa = q.new_empty(*q.shape[:-1], values.shape[-1]), q.new_empty(q.shape[:-1])
    for lo in range(0, q.shape[-2], block):
        w = rows_of_weights(q, k, mask, bias, is_causal, lo, hi := min(lo + block, q.shape[-2]))
        out[..., lo:hi, :] = w @ values[..., : w.shape[-1], :]
        kappa[..., lo:hi] = torch.linalg.vector_norm(w, dim=-1).square_()
    return out, kappa


# %%
#| exports
def _backward_blocks(g_out, g_kappa, saved: tuple, is_causal: bool, block: int) -> tuple[Tensor, Tensor, Tensor]:
    "Gradients by q, k and V⁺, with the rows of w computed again."
    q, k, values, mask, bias, out, kappa = saved
    dq, dk, dvalues = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(values)
    twice = 2 * g_kappa.unsqueeze(-1)
    c = (g_out * out).sum(-1, keepdim=True) + twice * kappa.unsqueeze(-1)
    for lo in range(0, q.shape[-2], block):
        w = rows_of_weights(q, k, mask, bias, is_causal, lo, hi := min(lo + block, q.shape[-2]))
        j = w.shape[-1]
        dw = g_out[..., lo:hi, :] @ values[..., :j, :].mT
        dlogits = dw.addcmul_(w, twice[..., lo:hi, :]).sub_(c[..., lo:hi, :]).mul_(w)  # (20.2)
        dvalues[..., :j, :] += w.mT @ g_out[..., lo:hi, :]
        dk[..., :j, :] += dlogits.mT @ q[..., lo:hi, :]
        dq[..., lo:hi, :] = dlogits @ k[..., :j, :]
    return dq, dk, dvalues


# %% [markdown]
# Autograd is told that the two passes belong together, and what to keep in between: inputs and outputs, no weights.


# %%
#| exports
class _BlockedMoments(torch.autograd.Function):
    "w V⁺ and κ = Σ w² block by block, recomputed in the backward pass: memory linear in the length. First order only."

    @staticmethod
    def forward(ctx, q, k, values, mask, bias, is_causal: bool, block: int):
        out, kappa = _forward_blocks(q, k, values, mask, bias, is_causal, block)
        ctx.save_for_backward(q, k, values, mask, bias, out, kappa)
        ctx.is_causal, ctx.block = is_causal, block
        return out, kappa

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_out, g_kappa):
        with torch.autocast(g_out.device.type, enabled=False):
            grads = _backward_blocks(g_out, g_kappa, ctx.saved_tensors, ctx.is_causal, ctx.block)
        return *grads, None, None, None, None


# %%
#| exports
BLOCK = 64  # queries per block, of all sequences and heads at once: 64 × 2048 weights of one head are half a megabyte


# %% [markdown]
# What the weights are applied to, $V^+$, and how the moments are read off $wV^+$, is the same whoever computes the weights:

# %%
#| exports
def augmented(
    v: Float[Tensor, "b h j kv"],  # values, [v]
    lam_bar: Float[Tensor, "b #h j"],  # λ̄ > 0, [h⁻²]
    diagonal: bool,  # S per value dimension, or its mean
) -> Float[Tensor, "b h j c"]:  # c = 2 kv + 1 if diagonal, else kv + 2
    "V⁺ of (20.1): the values, their squares (or the mean of these), and 1/λ̄, side by side."
    second = v.square() if diagonal else v.square().mean(-1, keepdim=True)
    return torch.cat([v, second, lam_bar.reciprocal().unsqueeze(-1).expand(*v.shape[:-1], 1)], -1)


# %%
#| exports
def read_moments(
    out: Float[Tensor, "b h t c"],  # w V⁺, of `augmented`
    kappa: Float[Tensor, "b h t"],  # κ = Σ w², [1]
    width: int,  # kv, of the values in V⁺
) -> Moments:
    "The moments (20.1) that $wV^+$ and κ hold; S, a difference, is cut off at zero."
    e, second, s2_0 = out.split([width, out.shape[-1] - width - 1, 1], -1)
    square = e.square() if second.shape[-1] > 1 else e.square().mean(-1, keepdim=True)
    return Moments(e, (second - square).clamp_min(0), s2_0.squeeze(-1), kappa)


# %%
#| exports
def moments_blocked(
    q: Float[Tensor, "b h t k"],  # as in `moments_explicit`
    k: Float[Tensor, "b h j k"],
    v: Float[Tensor, "b h j kv"],
    lam_bar: Float[Tensor, "b #h j"],
    mask: Bool[Tensor, "#b #h #t j"] | None,
    bias: Float[Tensor, "#b #h #t j"] | None,
    is_causal: bool,
    diagonal: bool,
    block: int = BLOCK,  # queries at a time
) -> Moments:
    "Equation (20.1) without a T × T table: equal to `moments_explicit` up to rounding."
    ones, reliability = torch.ones_like(q[..., :1]), lam_bar.unsqueeze(-1).expand(*k.shape[:-1], 1)
    q, k = torch.cat([q, ones], -1), torch.cat([k, reliability.log()], -1)
    out, kappa = _BlockedMoments.apply(q, k, augmented(v, lam_bar, diagonal), mask, bias, is_causal, block)
    return read_moments(out, kappa, v.shape[-1])


# %%
blocked = moments_blocked(q, k, v, lam_bar[:, None], None, None, False, True)
for got, want in zip(blocked, tiny): torch.testing.assert_close(got, want)

# %% [markdown]
# ## `observe`
#
# The public function checks its input, works in float32 or wider whatever the input's dtype, gathers the moments by whichever rung is asked for, and closes with the posterior of chapter 11. The rungs are entries of one table, so that a fused kernel is one more entry.

# %%
#| exports
class Observation(NamedTuple):
    "A belief about what a query saw, per head, and from how many keys."

    mean: Float[Tensor, "b h t k"]  # e, [v]
    precision: Float[Tensor, "b h t r"]  # λ_obs, [v⁻²]; r = k (diagonal) or 1 (isotropic)
    n_eff: Float[Tensor, "b h t"]  # Kish's effective sample size, in [1, visible keys]; 0 where no key is visible


# %%
#| exports
IMPLEMENTATIONS: dict[str, Callable[..., Moments]] = {"explicit": moments_explicit, "blocked": moments_blocked}


# %%
#| exports
def check_options(
    resolution: str,  # "diagonal" or "isotropic"
    weights: str,  # "reliability" or "precision"
    nu0: float,  # > 0
    impl: str,  # a key of `IMPLEMENTATIONS`
) -> None:
    "Raise `ValueError` for an option of `observe` that is not one."
    check_option("resolution", resolution, ("diagonal", "isotropic"))
    check_option("weights", weights, ("reliability", "precision"))
    check_option("impl", impl, IMPLEMENTATIONS)
    check_positive("nu0", nu0)


# %%
#| exports
def _check_shapes(q: Tensor, k: Tensor, v: Tensor, lam_bar: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("lam_bar", lam_bar)):
        check_floating(name, x)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must have four dimensions (b, h, t, k), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    b, h, t, d = q.shape
    if not d or t and not k.shape[2]:
        raise ValueError(f"queries need a width and at least one key, got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if k.shape[:2] != (b, h) or k.shape[-1] != d or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q (b, h, t, k), k (b, h, j, k), v (b, h, j, ·) do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if lam_bar.shape != (b, k.shape[2]):
        raise ValueError(f"lam_bar must have shape (b, j) = {(b, k.shape[2])}, got {tuple(lam_bar.shape)}")
    if is_causal and t != k.shape[2]:
        raise ValueError(f"is_causal needs as many queries as keys, got {t} and {k.shape[2]}")
    if mask is not None:
        full = (b, h, t, k.shape[2])
        if mask.dim() != 4 or any(m not in (1, f) for m, f in zip(mask.shape, full, strict=True)) or mask.shape[-1] != full[-1]:
            raise ValueError(f"mask must broadcast to (b, h, t, j) = {full} and name every key, got shape {tuple(mask.shape)}")


# %%
#| exports
def _check_shift(shift: Tensor, v: Tensor) -> None:
    "One shift for all keys: `ValueError` for another shape."
    full = (*v.shape[:2], 1, v.shape[3])
    try:
        fits = torch.broadcast_shapes(shift.shape, full) == full
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"shift must be the same for all keys and broadcast to (b, h, 1, kv) = {full}, got shape {tuple(shift.shape)}")


# %% [markdown]
# $S = \sum w v^2 - e^2$ subtracts two numbers that may both be large (chapter 11): the values are therefore shifted towards the origin first, and the mean is shifted back. The shift must be the same for all queries, or $S$ would no longer be one matrix product, and no query may learn from it about keys it cannot see, not even through rounding. A layer knows a good constant (chapter 22); without one, the first key serves that is visible to every query that sees any, and where there is none, as in a batch that packs several texts into one row, nothing is shifted.

# %%
#| exports
def _origin(v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    "A value near all others, (b, h, 1, k), without gradient (`common_value`): S and e do not depend on it."
    if mask is None:
        return v[..., :1, :].detach()
    return common_value(v, mask.tril() if is_causal and mask.shape[-2] > 1 else mask)  # of the keys that one line shows, all queries that see any see the first


# %% [markdown]
# A floating-point mask is added to the logits, as in torch. Minus infinity hides a key, and so does the most negative finite number of the mask's dtype, which some libraries write instead: a key with such a logit must not be counted among the visible ones.

# %%
#| exports
def _split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    "(visible, additive) from a boolean or a floating-point mask."
    if mask is None or isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask, None
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        raise TypeError(f"mask must be boolean (True = may be seen) or floating point (added to the logits), got {getattr(mask, 'dtype', mask)}")
    if mask.requires_grad:
        raise ValueError("mask requires a gradient, which no implementation of observe gives: pass mask.detach()")
    hidden = mask <= max(HIDDEN, torch.finfo(mask.dtype).min)
    return (~hidden if hidden.any() else None), mask.masked_fill(hidden, 0)


# %% [markdown]
# Queries without keys get "no evidence": zero mean, variance `NO_EVIDENCE`, effective sample size zero **[D]**.

# %%
#| exports
def _without_evidence(m: Moments, seen: Bool[Tensor, "#b #h t"]) -> Moments:
    "Replace the moments of queries that see no key, without a gradient into what they could not see."
    row = seen.unsqueeze(-1)
    return Moments(
        torch.where(row, m.e, 0), torch.where(row, m.scatter, 0), torch.where(seen, m.s2_0, 1), torch.where(seen, m.kappa, 1)
    )


# %% [markdown]
# Looking for a NaN in every input would take longer than it is worth. The result shows it: only when a variance is not a finite number does the code look for the culprit. (On a CPU; an accelerator would have to be waited for.)

# %%
#| exports
def _blame(lam_bar: Tensor, kappa: Tensor, prior: Tensor, **inputs: Tensor | None) -> None:
    "Raise `ValueError` naming the input that made an observation undefined."
    check_precision(lam_bar, "lam_bar")
    check_finite(lam_bar.reciprocal(), "lam_bar must be large enough for a finite variance, but its reciprocal overflows: the variance")
    for name, x in inputs.items():
        if x is not None: check_finite(x, name)
    check_finite(kappa, "q and k must be small enough for finite logits, but their products overflow: the effective sample size")
    check_finite(prior, "nu0 and 1/lam_bar must be small enough for finite products, but they overflow: the prior")
    raise ValueError("v must be small enough for finite squares, but they overflow")


# %%
#| exports
def observe(
    q: Float[Tensor, "b h t k"],  # queries
    k: Float[Tensor, "b h j k"],  # keys
    v: Float[Tensor, "b h j kv"],  # values, [v]
    lam_bar: Float[Tensor, "b j"],  # reliability λ̄ of each key: mean precision over features, > 0, [h⁻²]
    *,
    mask: Tensor | None = None,  # bool (True = may be seen) or float (added); broadcasts to (b, h, t, j)
    is_causal: bool = False,  # query t sees keys j ≤ t only
    scale: float | None = None,  # of the logits; None: 1/√k
    resolution: str = "diagonal",  # of S and λ_obs: "diagonal" (per value dimension) or "isotropic" (per head)
    weights: str = "reliability",  # reading of the weights, chapter 11: "reliability" or "precision"
    nu0: float = 1.0,  # ν₀, degrees of freedom of the prior, > 0
    shift: Float[Tensor, "..."] | None = None,  # constant near v, broadcasts to (b, h, 1, kv), [v]: only rounding depends on it; None: the value of a key that all queries see
    impl: str = "blocked",  # a key of `IMPLEMENTATIONS`; the derivatives of torch.func need "explicit"
) -> Observation:  # in float32 or wider; the mean in v's dtype
    "Self-attention as kriging with a REML observation precision, (20.1) and chapter 11 [@bft2026]. Raises `ValueError` or `TypeError` on input that does not fit."
    check_options(resolution, weights, nu0, impl)
    check_flag("is_causal", is_causal)
    if scale is not None:
        check_positive("scale", scale, zero=True)
    visible, bias = _split_mask(mask)
    _check_shapes(q, k, v, lam_bar, mask, is_causal)
    if shift is not None:
        _check_shift(shift, v)
    counts = visible_keys(visible, is_causal, q.shape[2], k.shape[2]).to(q.device)
    with torch.autocast(q.device.type, enabled=False):
        wide = wide_dtype(q, k, v, lam_bar)
        q, k, bias = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale), k.to(wide), None if bias is None else bias.to(wide)
        origin = (_origin(v, visible, is_causal) if shift is None else shift.detach()).to(wide)
        moments = IMPLEMENTATIONS[impl](q, k, v.to(wide) - origin, lam_bar.to(wide)[:, None], visible, bias, is_causal, resolution == "diagonal")
        seen = counts > 0
        if visible is not None:  # else every query sees a key
            moments, origin = _without_evidence(moments, seen), origin * seen.unsqueeze(-1)
        e, s, s2_0, kappa = moments
        keys = counts.clamp_min(1).to(kappa.dtype).unsqueeze(-1) if weights == "precision" else None
        try:
            variance = observation_variance(s, kappa.unsqueeze(-1), s2_0.unsqueeze(-1), nu0, keys)
            check_finite(variance, "variance")
        except ValueError:
            _blame(lam_bar, kappa, nu0 * s2_0, q=q, k=k, v=v, mask=bias)
        if visible is not None:
            variance = torch.where(seen.unsqueeze(-1), variance, NO_EVIDENCE)
        return Observation((e + origin).to(v.dtype), variance.reciprocal(), seen / kappa)


# %%
seen = observe(q, k, v, lam_bar, is_causal=True)
seen.n_eff[0, 0], seen.mean[0, 0, :, 0], seen.precision[0, 0, :, 0]

# %% [markdown]
# Read the three rows. The first token sees itself: one key, precision $\bar\lambda_1 = 1$, exactly what the tracked precision claims. The second adds an unreliable key that contradicts the first: the scatter pulls the precision down to 0.18. The third repeats the first: it is surer than the second, and still less sure than the first, which has heard no contradiction.
#
# ## Lessons
#
# **The formula.** For one query and two keys, (20.1) and (11.9) with $\nu_0 = 1$ are short enough to write out. Both rungs agree with them in value and first derivative:

# %%
l1, l2, v1, v2 = sp.symbols("l1 l2 v1 v2", real=True)
r1, r2 = sp.symbols("lambdabar1 lambdabar2", positive=True)
W = [sp.exp(x) * r / (sp.exp(l1) * r1 + sp.exp(l2) * r2) for x, r in ((l1, r1), (l2, r2))]
e, kappa, s2_0 = W[0] * v1 + W[1] * v2, W[0] ** 2 + W[1] ** 2, W[0] / r1 + W[1] / r2
variance = kappa * (kappa * s2_0 + W[0] * v1**2 + W[1] * v2**2 - e**2)


# %%
def one_query(impl, *x):  # six tensors (n,): logits, reliabilities, values of two keys
    logits, lam_bar, v = (torch.stack(x[i : i + 2], -1) for i in (0, 2, 4))
    return observe(torch.ones(len(v), 1, 1, 1).double(), logits[:, None, :, None], v[:, None, :, None], lam_bar, scale=1.0, impl=impl)


# %%
for impl in IMPLEMENTATIONS:
    for formula, name in ((e, "mean"), (1 / variance, "precision"), (1 / kappa, "n_eff")):
        assert_same(formula, (l1, l2, r1, r2, v1, v2), lambda *x, impl=impl, name=name: getattr(one_query(impl, *x), name).flatten())

# %% [markdown]
# **The two rungs agree**, in value and in gradient, also with padding, a causal mask and a bias at once (tests/ repeats this at $T = 300$ in float32):

# %%
gen = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(2, 3, 70, 4, generator=gen, dtype=torch.float64).requires_grad_() for _ in range(3))
lam_bar = (0.1 + torch.rand(2, 70, generator=gen, dtype=torch.float64)).requires_grad_()
valid = (torch.arange(70) < torch.tensor([[70], [41]]))[:, None, None, :]


# %%
def value_and_gradients(impl, resolution):
    seen = observe(q, k, v, lam_bar, mask=valid, is_causal=True, resolution=resolution, impl=impl)
    loss = seen.mean.sin().sum() + seen.precision.log().sum() + seen.n_eff.log().sum()
    return *seen, *torch.autograd.grad(loss, (q, k, v, lam_bar))


# %%
for resolution in ("diagonal", "isotropic"):
    for got, want in zip(value_and_gradients("blocked", resolution), value_and_gradients("explicit", resolution)):
        torch.testing.assert_close(got, want)

# %% [markdown]
# **Memory.** What autograd keeps for the backward pass, counted in bytes: the explicit rung keeps tables that grow with $T^2$, the blocked one keeps its inputs and outputs (@fig-memory).


# %%
def saved_bytes(impl, t):
    q, k, v = (torch.randn(1, 2, t, 32).requires_grad_() for _ in range(3))
    storages = {}
    def keep(x): storages[x.untyped_storage().data_ptr()] = x; return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        observe(q, k, v, torch.ones(1, t), is_causal=True, impl=impl)
    return sum(x.untyped_storage().nbytes() for x in storages.values())


# %%
#| label: fig-memory
#| fig-cap: "Bytes kept for the backward pass: the explicit weights grow with the square of the length, the blocked form with the length (one sequence, two heads of width 32)."
#| code-fold: true
lengths = [64, 128, 256, 512, 1024]
fig, ax = plt.subplots()
for impl, role in (("explicit", "baseline"), ("blocked", "posterior")):
    ax.loglog(lengths, [saved_bytes(impl, t) / 2**20 for t in lengths], "o-", color=COLOUR[role], label=impl, base=2)
ax.set(xlabel="length T [tokens]", ylabel="kept [MiB]")
ax.legend()
plt.show()

# %% [markdown]
# **Information follows context.** In a causal sequence of equally reliable, independent tokens the effective sample size, and with it the observation precision, grows with position (@fig-context). The paper sets this against a learned gate that looks at one token's features and does not change with the length of the context **[P]**.

# %%
gen = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(64, 1, 64, 8, generator=gen) for _ in range(3))
seen = observe(0.5 * q, k, v, torch.ones(64, 64), is_causal=True, resolution="isotropic")

# %%
#| label: fig-context
#| fig-cap: "Observation precision grows with the number of keys a query may look at (line: mean over 64 random sequences; band: ± 1 sd)."
#| code-fold: true
fig, ax = plt.subplots()
precision = seen.precision[:, 0, :, 0]
band(ax, range(1, 65), precision.mean(0), precision.std(0), "observation", "observation precision")
ax.axhline(1, color=COLOUR["prior"], linestyle="--", label="reliability of each key")
ax.set(xlabel="position t [tokens]", ylabel="precision [v⁻²]")
ax.legend()
plt.show()

# %% [markdown]
# **A query that sees nothing observes nothing**, and its gradients stay finite on the way back:

# %%
q, k, v = (torch.randn(1, 1, 3, 2, generator=gen).requires_grad_() for _ in range(3))
lam_bar = torch.ones(1, 3, requires_grad=True)
seen = observe(q, k, v, lam_bar, mask=padded, is_causal=True)
(seen.mean.sum() + seen.precision.sum()).backward()
assert all(x.grad.isfinite().all() for x in (q, k, v, lam_bar))
seen.n_eff[0, 0]

# %% [markdown]
# **Bad input is refused by name:**

# %%
one = torch.ones(1, 1, 3, 2)
test_fail(lambda: observe(one, one, one, torch.ones(1, 4)), contains="lam_bar must have shape")
test_fail(lambda: observe(one, one, one, torch.ones(1, 3), mask=torch.ones(3, 3)[None, None].int()), contains="got torch.int32")
test_fail(lambda: observe(one, one, one, torch.ones(1, 3), mask=torch.ones(1, 1, 2, 3, dtype=torch.bool)), contains="broadcast to (b, h, t, j)")
test_fail(lambda: observe(one, one, one, torch.ones(1, 3), resolution="full"), contains="'diagonal', 'isotropic'")

# %% [markdown]
# ## Assumptions, and where they break
#
# - *Reliability is one number per token.* $\bar\lambda_j$ averages the precision over features **[P]**; a token that is sure of half its features and unsure of the rest looks like one that is half sure of all.
# - *The reliability of $h_j$ stands for that of $v_j = W_V\,\mathrm{norm}(h_j)$.* The value projection mixes and rescales features. A wrong scale matters little where the scatter dominates the claim ($\kappa S$ against $\kappa^2 s_0^2$), and the learned initial precision can absorb it **[D]**.
# - *A token is one of its own neighbours.* It sees itself, so its own precision comes back as part of the observation, and the update counts it twice: a token alone, with precision 7, observes itself with precision 7 and ends with 14, at a gain of one half. We keep the diagonal, as the transformer does **[D]**; to leave the diagonal out, pass a mask.
# - *No dropout on the weights.* Dropping weights breaks $\sum_j w_{tj} = 1$, on which unbiasedness (chapter 10) rests: the layer of chapter 22 does without. What it drops are features of $e_t$, as torch's layer does too **[D]**.
# - The blocked rung has no second derivative, and no rung gives a gradient to a floating-point mask; asking for either is an error.
#
# ## Summary
#
# - Attention is kriging: four moments per query give mean and precision of an observation.
# - The moments are one matrix product with $[v, v^2, 1/\bar\lambda]$, so they can be computed block by block, with memory linear in the length.
# - A query without keys has no evidence: precision $10^{-30}$, which the update ignores.
#
# ## Exercises
#
# **1.** With all values equal, what does a query over $n$ equally relevant keys of reliability $\lambda$ observe?
#
# <details><summary>Answer</summary>
#
# Scatter is zero, so $1/\lambda_{\text{obs}} = \kappa^2/\lambda$, that is $\lambda_{\text{obs}} = n^2\lambda$. One factor $n$ comes from averaging $n$ values, the other from finding none that disagrees.

# %%
ones = torch.ones(1, 1, 5, 2)
observe(ones, ones, ones, torch.full((1, 5), 3.0)).precision[0, 0, 0, 0]

# %% [markdown]
# </details>
#
# **2.** Equation (20.2) sums to zero over $j$. Why must it?
#
# <details><summary>Answer</summary>
#
# Adding a constant to all logits of a query leaves the softmax, hence the loss, unchanged: the derivative along that direction is $\sum_j \partial L/\partial \ell_{tj} = 0$.

# %%
q, k = (torch.randn(1, 1, 5, 3, generator=gen).requires_grad_() for _ in range(2))
seen = observe(q, k, torch.randn(1, 1, 5, 2, generator=gen), torch.ones(1, 5))
(seen.mean.square().sum() + seen.precision.sum()).backward()
# the same step of all keys adds one number to all logits of a query
torch.testing.assert_close(k.grad.sum(-2), torch.zeros(1, 1, 3), atol=1e-4, rtol=0)

# %% [markdown]
# </details>
