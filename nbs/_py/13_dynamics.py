# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Predict: the feed-forward network is the dynamics
#
# > A step of dynamics stretches what is known, and process noise keeps the filter from believing itself for ever.

# %%
#| default_exp dynamics

# %% [markdown]
# **So far** a token observes (chapters 10 and 11) and updates (chapter 12), and its precision only ever grew. **Now** the feed-forward network moves the mean, and the precision must move with it.
# **Why**: a filter that only gains precision soon ignores every observation. What keeps it awake is an honest account of what the dynamics do to the error.

# %%
#| exports
from collections.abc import Callable, Hashable
from copy import copy
from functools import partial
from math import pi, sqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bft_nb.core import Belief, at_least_float32, check_not_negative, check_option, check_precision

# %%
import matplotlib.pyplot as plt
import sympy as sp
from fastcore.test import test_eq, test_fail
from torch.func import jacrev, vmap

from bft_nb.figures import COLOUR, use_style
from bft_nb.kalman import gain, update
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## The smallest case
#
# In the evening a room is at 20.4 °C, known with a standard deviation of 0.1 °C. Overnight it moves 30 % of the way towards the outside temperature, 12 °C: $x \to x + f(x)$ with $f(x) = -0.3\,(x - 12)$.
# The mean follows the map. An error is carried along by the slope, $1 + f' = 0.7$, so the standard deviation [°C] shrinks without anybody looking at a thermometer:

# %%
slope = -0.3
20.4 + slope * (20.4 - 12), abs(1 + slope) * 0.1

# %% [markdown]
# That is right for the part of the error that comes from the evening. But draughts and sunshine add an error of their own, say 0.2 °C. Variances add:

# %%
draughts = 0.2**2
variance = (1 + slope) ** 2 * 0.1**2 + draughts
variance**0.5, 1 / variance

# %% [markdown]
# The precision falls from 100 °C⁻² in the evening to 22 in the morning.
#
# ## The delta method
#
# **Claim.** A branch $f$ added to the residual stream, $h'' = h' + f(h')$, carries the precision to
#
# $$\tilde\lambda'' = \frac{\lambda'}{(1+J)^2}, \qquad J = \operatorname{diag}\frac{\partial f}{\partial h'} \tag{13.1}$$
#
# to first order in the error **[P]** [@bft2026; @oehlert1992]. Write the truth as $x = h' + \varepsilon$, with $\varepsilon$ of mean zero and variance $1/\lambda'$, and expand the map to first order in $\varepsilon$:

# %%
eps, h, J = sp.symbols("epsilon h J", real=True)
lam, lam_obs, q = sp.symbols("lambda lambda_obs q", positive=True)
f = sp.Function("f")
truth = (h + eps + f(h + eps)).series(eps, 0, 2).removeO().doit()
J_of_h = sp.diff(f(h), h)
prove(truth - (h + f(h)) - (1 + J_of_h) * eps)


# %% [markdown]
# The error of the output is $(1 + J)\,\varepsilon$. Its variance is the square of the factor times the variance of $\varepsilon$, and (13.1) is the inverse of that:

# %%
x, eps = sp.symbols("x varepsilon", real=True)
f = sp.Function("f")
first_order = (x + f(x)).subs(x, x + eps).diff(eps).subs(eps, 0).doit()
delta_variance = first_order.subs(sp.diff(f(x), x), J) ** 2 / lam
prove(1 / delta_variance - lam / (1 + J) ** 2)

# %% [markdown]
# Two approximations are involved. The expansion stops at first order (below we measure where that breaks), and the diagonal stands for the whole Jacobian: the exact first-order variance of feature $i$, for features with independent errors, is
# $\sum_k (\delta_{ik} + \partial f_i/\partial h_k)^2/\lambda'_k$, of which (13.1) keeps the term $k = i$. The dropped terms are positive; process noise stands in for them.
#
# ## Process noise
#
# The dynamics themselves are not exact either. So an independent error is added, with a learnt variance $Q \ge 0$ per feature **[P]**:
#
# $$\lambda'' = \left(\frac{(1+J)^2}{\lambda'} + Q\right)^{-1} = \frac{\lambda'}{(1+J)^2 + Q\lambda'} \tag{13.2}$$

# %%
propagated = 1 / (delta_variance + q)
prove(propagated - lam / ((1 + J) ** 2 + q * lam))

# %% [markdown]
# **Theorem (bounded precision) [D].** If $Q > 0$, then $\lambda'' \le 1/Q$ whatever $\lambda'$ is, and strictly less unless $J = -1$. The gap is a square over positive numbers:

# %%
gap = 1 / q - propagated
prove(gap - (1 + J) ** 2 / (q * ((1 + J) ** 2 + q * lam)))

# %% [markdown]
# No amount of observing lifts a token above $1/Q$ after the step: the largest precision is a parameter of the model. At $J = -1$ the dynamics forget the past entirely, and what is left is exactly the bound:

# %%
prove(propagated.subs(J, -1) - 1 / q), sp.limit(propagated, lam, sp.oo)

# %% [markdown]
# With $Q = 0$ and $J = -1$ nothing bounds the precision, and (13.2) divides by zero. The code therefore clamps the growth factor, $(1 + J)^2 \ge 10^{-6}$ **[D]**: one step may raise the precision at most a millionfold.
# The clamp acts only where $|1 + J| < 10^{-3}$. We clamp the factor rather than the precision, so that $J = 0$, $Q = 0$ stays exactly the identity.


# %%
#| exports
MIN_GROWTH = 1e-6  # smallest (1 + J)² taken, no unit


# %%
#| exports
def propagate(
    lam: Float[Tensor, "..."],  # precision before the step λ' > 0, [h⁻²]
    jac: Float[Tensor, "..."],  # J, diagonal of the branch's Jacobian, no unit
    q: Float[Tensor, "..."],  # process noise Q ≥ 0, a variance, [h²]
) -> Float[Tensor, "..."]:  # λ'' > 0, at most 1/Q, [h⁻²], float32 or wider
    "Precision after a step of dynamics (13.2) [@bft2026; @oehlert1992]; (1 + J)² is clamped at `MIN_GROWTH`. The three broadcast. `ValueError`, on a CPU, for a negative λ' or Q."
    lam, q = at_least_float32(lam), at_least_float32(q)
    check_not_negative(lam, "precision")
    check_not_negative(q, "process noise")
    growth = (1 + at_least_float32(jac)).square().clamp(min=MIN_GROWTH)
    return lam / (growth + q * lam)


# %%
propagate(torch.tensor(100.0), torch.tensor(slope), torch.tensor(draughts))

# %% [markdown]
# The second form of (13.2) divides once and never squares a small variance in its backward pass. It is the proved formula, in value and gradient:

# %%
assert_same(propagated, (lam, J, q), propagate)

# %% [markdown]
# It also stays finite, with finite gradients, over the range of precisions that the library promises ($10^{-6}$ to $10^6$), here at $J = -1$ without noise:

# %%
wide = torch.logspace(-6, 6, 13).requires_grad_()
worst = propagate(wide, torch.tensor(-1.0), torch.tensor(0.0))
worst.sum().backward()
assert worst.isfinite().all() and wide.grad.isfinite().all()
worst.max()


# %% [markdown]
# ## Predict as code
#
# The branch moves the mean, (13.2) moves the precision.


# %%
#| exports
def predict(
    belief: Belief,  # h' and λ', after the update
    delta: Float[Tensor, "*batch d"],  # the branch's output f(h'), [h]
    jac: Float[Tensor, "..."],  # its diagonal Jacobian J, broadcasts against λ'
    q: Float[Tensor, "..."],  # process noise Q ≥ 0, broadcasts against λ', [h²]
) -> Belief:  # h'' in the dtype of h', λ'' in float32 or wider
    """One step of the dynamics: h'' = h' + f(h') and the precision by (13.2) [@bft2026].

    `ValueError` if `delta` does not have the shape of the mean, or the precision would not have it."""
    if delta.shape != belief.mean.shape:
        raise ValueError(f"delta must have the shape of the mean, {tuple(belief.mean.shape)}, got {tuple(delta.shape)}")
    moved, precision = at_least_float32(belief.mean) + at_least_float32(delta), propagate(belief.precision, jac, q)
    if precision.shape != moved.shape:
        raise ValueError(f"precision, jac and q must broadcast to the shape of the mean, {tuple(moved.shape)}, got {tuple(precision.shape)}")
    return Belief(moved.to(belief.mean.dtype), precision)


# %%
evening = Belief(torch.tensor([20.4]), torch.tensor([100.0]))
predict(evening, slope * (evening.mean - 12), torch.tensor([slope]), torch.tensor([draughts]))

# %%
test_fail(lambda: predict(evening, torch.zeros(2), torch.zeros(1), torch.zeros(1)), contains="(1,), got (2,)")

# %% [markdown]
# ## Activation derivatives
#
# $J$ of a feed-forward network needs $\varphi'$. For the usual activations it has a closed form:
#
# $$\text{relu}'(a) = [a > 0] = \tfrac12 (1 + \operatorname{sign} a), \quad \text{gelu}'(a) = \Phi(a) + a\,\phi(a), \quad \text{silu}'(a) = s\,(1 + a(1 - s)),\ s = \operatorname{sigmoid}(a) \tag{13.3}$$
#
# with $\Phi$ and $\phi$ the distribution function and the density of the standard normal. ReLU is $(a + |a|)/2$, SiLU $a\,s$, and GELU $a\,\Phi(a)$. (At the kink itself ReLU has no derivative; SymPy's convention is one half, torch's and ours is 0.)

# %%
a = sp.Symbol("a", real=True)
relu_derivative = (1 + sp.sign(a)) / 2
prove(sp.diff((a + sp.Abs(a)) / 2, a) - relu_derivative)

# %%
s = 1 / (1 + sp.exp(-a))
prove(sp.diff(a * s, a) - s * (1 + a * (1 - s)))

# %%
Phi, phi = (1 + sp.erf(a / sp.sqrt(2))) / 2, sp.exp(-(a**2) / 2) / sp.sqrt(2 * sp.pi)
prove(sp.diff(a * Phi, a) - (Phi + a * phi))

# %% [markdown]
# The tanh approximation of GELU [@hendrycks2016] is $\tfrac a2(1 + t)$ with $t = \tanh u$ and $u = \sqrt{2/\pi}\,(a + 0.044715\,a^3)$. Its derivative is $\tfrac12(1+t) + \tfrac a2(1 - t^2)\,u'$:

# %%
u = sp.sqrt(2 / sp.pi) * (a + sp.Rational(44715, 10**6) * a**3)
gelu_tanh = a / 2 * (1 + sp.tanh(u))
prove(sp.diff(gelu_tanh, a) - (1 + sp.tanh(u)) / 2 - a / 2 * (1 - sp.tanh(u) ** 2) * sp.diff(u, a))


# %%
#| exports
def relu_slope(
    a: Float[Tensor, "..."],  # pre-activation, no unit
) -> Float[Tensor, "..."]:  # 1 where positive, else 0
    "Derivative of ReLU (13.3); 0 at the kink, as torch has it."
    return (a > 0).to(a.dtype)


# %%
#| exports
def gelu_slope(
    a: Float[Tensor, "..."],  # pre-activation, no unit
) -> Float[Tensor, "..."]:  # Φ(a) + a φ(a)
    "Derivative of the exact GELU (13.3) [@hendrycks2016]."
    return 0.5 * (1 + torch.erf(a / sqrt(2))) + a * torch.exp(-a.square() / 2) / sqrt(2 * pi)


# %%
#| exports
def gelu_tanh_slope(
    a: Float[Tensor, "..."],  # pre-activation, no unit
) -> Float[Tensor, "..."]:  # (1 + t)/2 + a (1 − t²) u'/2
    "Derivative of the tanh approximation of GELU [@hendrycks2016]."
    c, cubic, a = sqrt(2 / pi), 0.044715, a.clamp(-20, 20)  # beyond, it is 0 or 1, and the cube would overflow in float16
    t = torch.tanh(c * (a + cubic * a**3))
    return 0.5 * (1 + t) + 0.5 * a * (1 - t.square()) * c * (1 + 3 * cubic * a.square())


# %%
#| exports
def silu_slope(
    a: Float[Tensor, "..."],  # pre-activation, no unit
) -> Float[Tensor, "..."]:  # s (1 + a (1 − s))
    "Derivative of SiLU (13.3) [@hendrycks2016]."
    s = torch.sigmoid(a)
    return s * (1 + a * (1 - s))


# %% [markdown]
# Each function is compared with SymPy's derivative of the activation, for negative arguments too (constants such as $\sqrt{2}$ become floats first, which torch needs):

# %%
assert_same(relu_derivative, (a,), relu_slope, lo=-5)
assert_same(sp.diff(a * s, a), (a,), silu_slope, lo=-5)
numeric = lambda expr: expr.replace(lambda part: part.is_number and not part.is_Rational, lambda part: part.evalf())
assert_same(numeric(sp.diff(a * Phi, a)), (a,), gelu_slope, lo=-5)
assert_same(numeric(sp.diff(gelu_tanh, a)), (a,), gelu_tanh_slope, lo=-5)

# %% [markdown]
# A layer hands over its activation in whatever form it holds it: a name, a function, a module. Known forms get the closed form. Any other elementwise callable is differentiated by one forward-mode product, `torch.func.jvp`:
# for an elementwise function the Jacobian is diagonal, so its product with a vector of ones *is* the diagonal. (For a function that mixes features, such as softmax, it would not be: such a callable must not be passed.)


# %%
#| exports
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (F.relu, relu_slope),
    "gelu": (F.gelu, gelu_slope),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), gelu_tanh_slope),
    "silu": (F.silu, silu_slope),
}  # name -> (activation, derivative)


# %%
#| exports
def _known_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    by_type, by_function = {nn.ReLU: "relu", nn.SiLU: "silu"}, {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}
    return by_type.get(type(activation)) or (by_function.get(activation) if isinstance(activation, Hashable) else None)


# %%
#| exports
def activation_and_slope(
    activation: str | Callable[[Tensor], Tensor],  # a key of `ACTIVATIONS`, or an elementwise function or module
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:  # φ and φ'
    "The activation and its derivative: (13.3) where known, else by `torch.func.jvp`. A module that works in place is given back as one that does not. `ValueError` for an unknown name."
    name = activation if isinstance(activation, str) else _known_name(activation)
    if name is None and callable(activation):
        if getattr(activation, "inplace", False):
            activation = copy(activation)
            vars(activation)["inplace"] = False
        return activation, lambda a: torch.func.jvp(activation, (a,), (torch.ones_like(a),))[1]
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be a callable or one of {sorted(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[name]


# %%
test_eq(activation_and_slope(nn.GELU(approximate="tanh")), ACTIVATIONS["gelu_tanh"])
test_fail(lambda: activation_and_slope("swish"), contains="got 'swish'")
mish_slope = activation_and_slope(F.mish)[1]
mish_slope(torch.tensor([-1.0, 0.0, 1.0]))

# %% [markdown]
# ## The norm in front
#
# The branch of a pre-norm layer starts with a normalisation. LayerNorm [@ba2016] and RMSNorm [@zhang2019] divide by a root mean square $s$ that depends on the feature itself; LayerNorm also subtracts the mean:
#
# $$\hat x = \frac{h - \mu}{s}, \qquad \frac{\partial \hat x_k}{\partial h_i} = \frac1s\Big(\delta_{ki} - \frac1d - \frac{\hat x_k \hat x_i}{d}\Big) \tag{13.4}$$
#
# and for RMSNorm the same with $\mu = 0$ and without the $1/d$. The $\epsilon$ inside $s$ changes nothing: the formula remains exact. For $d = 3$:

# %%
d = 3
H = sp.symbols("h:3", real=True)
norm_eps = sp.Symbol("varepsilon", positive=True)


def standardised(centre):
    mu = centre * sum(H) / d
    std = sp.sqrt(sum((x - mu) ** 2 for x in H) / d + norm_eps)
    return [(x - mu) / std for x in H], std


# %%
xhat, std = standardised(centre=1)
derivative = lambda k, i: (int(k == i) - sp.Rational(1, d) - xhat[k] * xhat[i] / d) / std
prove(sp.diff(xhat[0], H[0]) - derivative(0, 0)), prove(sp.diff(xhat[1], H[0]) - derivative(1, 0))

# %%
rms_xhat, rms = standardised(centre=0)
prove(sp.diff(rms_xhat[0], H[0]) - (1 - rms_xhat[0] ** 2 / d) / rms), prove(sp.diff(rms_xhat[1], H[0]) + rms_xhat[1] * rms_xhat[0] / d / rms)


# %%
#| exports
NORMS = ("layer", "rms")  # kinds of normalisation in front of a branch


# %%
#| exports
def standardise(
    h: Float[Tensor, "*batch d"],  # input of the norm, [h]
    norm: str = "layer",  # "layer" or "rms"
    eps: float = 1e-5,  # added to the mean square, [h²]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch 1"]]:  # x̂ (no unit) and 1/s [1/h]
    "What a norm computes before its weight and bias (13.4) [@ba2016; @zhang2019], in float32 or wider. `ValueError` for an unknown norm."
    check_option("norm", norm, NORMS)
    h = at_least_float32(h)
    centred = h - h.mean(-1, keepdim=True) if norm == "layer" else h
    inv_std = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inv_std, inv_std


# %%
#| exports
def norm_jacobian(
    xhat: Float[Tensor, "*batch d"],  # x̂ of `standardise`
    inv_std: Float[Tensor, "*batch 1"],  # 1/s of `standardise`, [1/h]
    weight: Float[Tensor, " d"] | None = None,  # γ, the norm's weight
    norm: str = "layer",  # "layer" or "rms"
) -> Float[Tensor, "*batch d"]:  # diagonal of ∂(γ x̂ + β)/∂h, [1/h]
    "Exact diagonal of the Jacobian of LayerNorm or RMSNorm (13.4, k = i). `ValueError` for an unknown norm."
    check_option("norm", norm, NORMS)
    shared = 1.0 if norm == "layer" else 0.0
    diagonal = inv_std * (1 - (shared + xhat.square()) / xhat.shape[-1])
    return diagonal if weight is None else diagonal * weight


# %%
token = torch.tensor([20.0, 21.0, 25.0], dtype=torch.float64)
diagonal = norm_jacobian(*standardise(token))
torch.testing.assert_close(diagonal, jacrev(lambda h: F.layer_norm(h, (3,)))(token).diagonal())
diagonal

# %% [markdown]
# The formula again, as a function of $h$ with weight $\gamma$ and gradient:

# %%
gamma = sp.Symbol("gamma", positive=True)
norm_slope = (gamma * derivative(0, 0)).subs(norm_eps, sp.Float(1e-5))
assert_same(norm_slope, (*H, gamma), lambda x, y, z, g: norm_jacobian(*standardise(torch.stack([x, y, z], -1)), g[:, None])[:, 0])

# %% [markdown]
# ## The feed-forward network, exactly
#
# The branch is $f(h) = W_2\,\varphi(a) + b_2$ with $a = W_1(\gamma \hat x + \beta) + b_1$. The chain rule puts $\varphi'(a_f)$ between the two matrices and (13.4) behind them. Writing $\varphi'_f$ for the slopes,
# $G = W_1 \operatorname{diag}\gamma$ for the folded first matrix, $\bar G_f = \frac1d\sum_k G_{fk}$ for its row means, and $b_f = (b_1 + W_1\beta)_f$ for the pre-activation at $\hat x = 0$:
#
# $$J_i = \frac1s\Big[\underbrace{\sum_f \varphi'_f\, W_{2,if}\,(G_{fi} - \bar G_f)}_{\text{one matmul with } M = W_2 \circ (G - \bar G)^\top} - \frac{\hat x_i}{d} \underbrace{\sum_f W_{2,if}\, \varphi'_f\,(a_f - b_f)}_{\text{one matmul with } W_2}\Big] \tag{13.5}$$
#
# The last sum uses $\sum_k G_{fk}\hat x_k = a_f - b_f$, a number that the layer already has. RMSNorm drops $\bar G$; without a norm only $\sum_f \varphi'_f W_{2,if} W_{1,fi}$ is left.
# So the exact diagonal costs two matmuls from $f$ to $d$, where the full Jacobian would cost $d$ of them. The proof for $d = 3$ and two hidden units, with $\hat x$, $s$ and the slopes as symbols and (13.4) as a matrix:

# %%
W1, W2 = sp.Matrix(2, 3, sp.symbols("w1_:6")), sp.Matrix(3, 2, sp.symbols("w2_:6"))
slopes, X, norm_gain = sp.Matrix(sp.symbols("phi1:3")), sp.Matrix(sp.symbols("x1:4")), sp.symbols("gamma1:4")
inv_s = sp.Symbol("r", positive=True)  # 1/s
G = W1 * sp.diag(*norm_gain)
norm_matrix = inv_s * (sp.eye(3) - sp.ones(3, 3) / 3 - X * X.T / 3)
by_chain_rule = W2 * sp.diag(*slopes) * G * norm_matrix


# %%
def claimed(i, centre):
    direct = sum(slopes[f] * W2[i, f] * (G[f, i] - centre * sum(G[f, :]) / 3) for f in range(2))
    return inv_s * (direct - X[i] / 3 * sum(W2[i, f] * slopes[f] * (G * X)[f] for f in range(2)))


# %%
[prove(by_chain_rule[i, i] - claimed(i, centre=1)) for i in range(3)]

# %%
rms_matrix = inv_s * (sp.eye(3) - X * X.T / 3)
[prove((W2 * sp.diag(*slopes) * G * rms_matrix)[i, i] - claimed(i, centre=0)) for i in range(3)]

# %% [markdown]
# The matrix $M$ depends on the weights only: it is the same for every token, and a layer may keep it until the weights change.


# %%
#| exports
def fold_weights(
    w1: Float[Tensor, "f d"],  # W₁, as in `nn.Linear`
    w2: Float[Tensor, "d f"],  # W₂, as in `nn.Linear`
    norm_weight: Float[Tensor, " d"] | None = None,  # γ
    norm: str | None = None,  # "layer", "rms" or None
) -> Float[Tensor, "d f"]:  # M of (13.5)
    "The matrix M of (13.5): what in the diagonal Jacobian depends on the weights alone. `ValueError` for shapes or norms that do not fit."
    if w1.shape != w2.shape[::-1]:
        raise ValueError(f"w1 must be (f, d) and w2 (d, f), got {tuple(w1.shape)} and {tuple(w2.shape)}")
    if norm is not None:
        check_option("norm", norm, NORMS)
    folded = w1 if norm_weight is None else w1 * norm_weight
    if norm == "layer":
        folded = folded - folded.mean(-1, keepdim=True)
    return w2 * folded.mT


# %%
#| exports
def _behind_norm(direct: Tensor, along: Tensor, norm: str, xhat: Tensor | None, inv_std: Tensor | None) -> Tensor:
    check_option("norm", norm, NORMS)
    if xhat is None or inv_std is None:
        raise ValueError(f"norm={norm!r} needs xhat and inv_std, got xhat={xhat is not None}, inv_std={inv_std is not None}")
    return inv_std * (direct - xhat * along / xhat.shape[-1])


# %%
#| exports
def ffn_jacobian(
    a: Float[Tensor, "*batch f"],  # pre-activation W₁(γ x̂ + β) + b₁, as the layer computed it
    w1: Float[Tensor, "f d"],  # W₁
    w2: Float[Tensor, "d f"],  # W₂
    activation: str | Callable[[Tensor], Tensor] = "relu",  # φ
    *,
    norm: str | None = None,  # what stands in front: "layer", "rms" or nothing
    xhat: Float[Tensor, "*batch d"] | None = None,  # x̂, with a norm
    inv_std: Float[Tensor, "*batch 1"] | None = None,  # 1/s, with a norm, [1/h]
    norm_weight: Float[Tensor, " d"] | None = None,  # γ
    a_zero: Float[Tensor, " f"] | None = None,  # b₁ + W₁β, the pre-activation at x̂ = 0; None is 0
    folded: Float[Tensor, "d f"] | None = None,  # M, if the caller kept it
) -> Float[Tensor, "*batch d"]:  # J, no unit, float32 or wider
    "Exact diagonal of the Jacobian of W₂ φ(W₁ norm(h) + b₁) + b₂ (13.5): two matmuls f → d. `ValueError` for shapes or norms that do not fit."
    folded = fold_weights(w1, w2, norm_weight, norm) if folded is None else folded
    slope = activation_and_slope(activation)[1](a)
    direct = at_least_float32(F.linear(slope, folded))
    if norm is None:
        return direct
    along = at_least_float32(F.linear(slope * (a if a_zero is None else a - a_zero), w2))
    return _behind_norm(direct, along, norm, xhat, inv_std)

# %% [markdown]
# We check the function on a LayerNorm branch of width 4 with 6 hidden units, against the full Jacobian by automatic differentiation, of which the function itself makes no use:

# %%
gen = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
tokens, w1, b1, w2, weight, bias = draw(5, 4), draw(6, 4), draw(6), draw(4, 6), draw(4), draw(4)


def branch(h):
    return F.linear(F.gelu(F.linear(F.layer_norm(h, (4,), weight, bias), w1, b1)), w2)


# %%
x_hat, inv_std = standardise(tokens)
pre = F.linear(x_hat * weight + bias, w1, b1)
jac = ffn_jacobian(pre, w1, w2, "gelu", norm="layer", xhat=x_hat, inv_std=inv_std, norm_weight=weight, a_zero=F.linear(bias, w1, b1))
exact = vmap(jacrev(branch))(tokens).diagonal(dim1=-2, dim2=-1)
torch.testing.assert_close(jac, exact)
jac[0]

# %% [markdown]
# How much does each part of (13.5) matter? Leaving out the norm's correction (the mean and the $\hat x$ term) makes an error of the size of $J$ itself:

# %%
uncorrected = inv_std * F.linear(activation_and_slope("gelu")[1](pre), w2 * (w1 * weight).mT)
((uncorrected - exact).norm() / exact.norm(), (jac - exact).norm() / exact.norm())

# %% [markdown]
# Wide layers suffer less, since both corrections carry a $1/d$; at $d = 64$ the error is still above ten per cent (exercise 3). Last, SymPy derives the formula from scratch, by differentiating the whole branch, and we compare it with the function, in value and in gradient with respect to every weight:

# %%
A1, A2 = sp.Matrix(2, 3, sp.symbols("p_:6")), sp.Matrix(3, 2, sp.symbols("q_:6"))
unit_eps = [expr.subs(norm_eps, sp.Float(1e-5)) for expr in xhat]
hidden = A1 * sp.Matrix(unit_eps)
silu = lambda x: x / (1 + sp.exp(-x))
whole_branch = (A2 * hidden.applyfunc(silu))[0]


# %%
def one_point(*values):
    h, w1, w2 = (torch.stack(part) for part in (values[:3], values[3:9], values[9:]))
    x_hat, inv_std = standardise(h)
    w1, w2 = w1.reshape(2, 3), w2.reshape(3, 2)
    return ffn_jacobian(F.linear(x_hat, w1), w1, w2, "silu", norm="layer", xhat=x_hat, inv_std=inv_std)[0]


# %%
assert_same(sp.diff(whole_branch, H[0]), (*H, *A1, *A2), vmap(one_point), n=32)

# %%
test_fail(lambda: fold_weights(w1, w1), contains="got (6, 4) and (6, 4)")
test_fail(lambda: ffn_jacobian(pre, w1, w2, norm="layer"), contains="needs xhat and inv_std")
test_fail(lambda: ffn_jacobian(pre, w1, w2, norm="batch", xhat=x_hat, inv_std=inv_std), contains="got 'batch'")

# %% [markdown]
# ### Gated networks
#
# SwiGLU [@shazeer2020] computes $W_d(\varphi(g) \circ u)$ from two pre-activations $g = W_g x$ and $u = W_u x$ with $\varphi$ = SiLU. The product rule gives two terms of the same form, one with slopes $\varphi'(g) \circ u$ behind $W_g$ and one with slopes $\varphi(g)$ behind $W_u$:
#
# $$J_i = \frac1s\Big[\sum_f \varphi'(g_f)\,u_f\, M^g_{if} + \sum_f \varphi(g_f)\, M^u_{if} - \frac{\hat x_i}{d} \sum_f W_{d,if}\big(\varphi'(g_f)\,u_f\,(g_f - g^0_f) + \varphi(g_f)\,(u_f - u^0_f)\big)\Big] \tag{13.6}$$
#
# where the superscript 0 marks the value at $\hat x = 0$, and $M^g$, $M^u$ are the $M$ of (13.5) with $W_g$, $W_u$ in place of $W_1$ and $W_d$ in place of $W_2$. The product rule is all that is new:

# %%
g_in, u_in = sp.Function("g")(h), sp.Function("u")(h)
gated = silu(g_in) * u_in
silu_prime = sp.diff(silu(a), a).subs(a, g_in)
prove(sp.diff(gated, h) - silu_prime * u_in * sp.diff(g_in, h) - silu(g_in) * sp.diff(u_in, h))


# %%
#| exports
def gated_ffn_jacobian(
    gate: Float[Tensor, "*batch f"],  # W_g x, before the activation
    up: Float[Tensor, "*batch f"],  # W_u x
    w_gate: Float[Tensor, "f d"],  # W_g
    w_up: Float[Tensor, "f d"],  # W_u
    w_down: Float[Tensor, "d f"],  # W_d
    activation: str | Callable[[Tensor], Tensor] = "silu",  # φ; silu makes it SwiGLU
    *,
    norm: str | None = None,  # what stands in front: "layer", "rms" or nothing
    xhat: Float[Tensor, "*batch d"] | None = None,  # x̂, with a norm
    inv_std: Float[Tensor, "*batch 1"] | None = None,  # 1/s, with a norm, [1/h]
    norm_weight: Float[Tensor, " d"] | None = None,  # γ
    gate_zero: Float[Tensor, " f"] | None = None,  # gate at x̂ = 0 (W_g β + bias); None is 0
    up_zero: Float[Tensor, " f"] | None = None,  # up at x̂ = 0; None is 0
    folded: tuple[Float[Tensor, "d f"], Float[Tensor, "d f"]] | None = None,  # M of gate and up, if kept
) -> Float[Tensor, "*batch d"]:  # J, no unit, float32 or wider
    "Exact diagonal of the Jacobian of W_d(φ(W_g x) ∘ W_u x) [@shazeer2020] with x = norm(h) (13.6): three matmuls f → d. Raises as `ffn_jacobian`."
    folded = folded or (fold_weights(w_gate, w_down, norm_weight, norm), fold_weights(w_up, w_down, norm_weight, norm))
    value, slope = activation_and_slope(activation)
    by_gate, by_up = slope(gate) * up, value(gate)
    direct = at_least_float32(F.linear(by_gate, folded[0]) + F.linear(by_up, folded[1]))
    if norm is None:
        return direct
    from_gate, from_up = gate if gate_zero is None else gate - gate_zero, up if up_zero is None else up - up_zero
    return _behind_norm(direct, at_least_float32(F.linear(by_gate * from_gate + by_up * from_up, w_down)), norm, xhat, inv_std)


# %%
w_up = draw(6, 4)


def swiglu_branch(h):
    x = F.rms_norm(h, (4,), weight, 1e-6)
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w_up), w2)


# %%
x_hat, inv_std = standardise(tokens, "rms", 1e-6)
x = x_hat * weight
jac = gated_ffn_jacobian(F.linear(x, w1), F.linear(x, w_up), w1, w_up, w2, norm="rms", xhat=x_hat, inv_std=inv_std, norm_weight=weight)
torch.testing.assert_close(jac, vmap(jacrev(swiglu_branch))(tokens).diagonal(dim1=-2, dim2=-1))
jac[0]

# %% [markdown]
# And the function is SymPy's derivative of the whole gated branch behind RMSNorm, in value and in gradient with respect to every weight:

# %%
A3 = sp.Matrix(2, 3, sp.symbols("g_:6"))
normed = sp.Matrix([expr.subs(norm_eps, sp.Float(1e-5)) for expr in rms_xhat])
whole_gated = (A2 * (A3 * normed).applyfunc(silu).multiply_elementwise(A1 * normed))[0]


# %%
def one_gated_point(*values):
    h, w_gate, w_up, w_down = (torch.stack(part) for part in (values[:3], values[3:9], values[9:15], values[15:]))
    x_hat, inv_std = standardise(h, "rms")
    w_gate, w_up, w_down = w_gate.reshape(2, 3), w_up.reshape(2, 3), w_down.reshape(3, 2)
    return gated_ffn_jacobian(F.linear(x_hat, w_gate), F.linear(x_hat, w_up), w_gate, w_up, w_down, norm="rms", xhat=x_hat, inv_std=inv_std)[0]


# %%
assert_same(sp.diff(whole_gated, H[0]), (*H, *A3, *A1, *A2), vmap(one_gated_point), n=32)

# %% [markdown]
# ## Freezing
#
# Now the whole cycle with constant inputs: a token observes with precision $\lambda_{\text{obs}}$ (12.2) and predicts (13.2), again and again. The update only ever adds.
# With $Q = 0$ and $|1 + J| \le 1$ nothing ever takes precision away: it grows without bound, and the gain falls to zero: the model **freezes** and ignores what it is told **[P]**.
# For $J = 0$ exactly: $\lambda$ grows by $\lambda_{\text{obs}}$ each step, so the gain after $n$ steps from $\lambda_0$ is

# %%
n, lam0 = sp.symbols("n lambda_0", positive=True)
gain_after = lam_obs / (lam0 + (n + 1) * lam_obs)
prove(gain_after - (lam_obs / (lam + lam_obs)).subs(lam, lam0 + n * lam_obs)), sp.limit(gain_after, n, sp.oo)

# %% [markdown]
# (Dynamics that stretch, $|1 + J| > 1$, lose precision on their own and do not freeze even without noise: see the fixed point below. $Q$ serves the features that shrink.) @fig-freeze runs the cycle with and without noise:


# %%
def gains(q, jac=0.0, lam_obs=1.0, steps=60):
    belief, history = Belief(torch.zeros(1), torch.ones(1)), []
    for _ in range(steps):
        history.append(gain(belief.precision, torch.full((1,), lam_obs)))
        belief = update(belief, Belief(torch.zeros(1), torch.full((1,), lam_obs)))
        belief = predict(belief, torch.zeros(1), torch.tensor(jac), torch.tensor(q))
    return torch.cat(history)


# %%
#| label: fig-freeze
#| fig-cap: "Without process noise the gain falls towards zero and the model stops listening; any Q > 0 keeps it awake."
#| code-fold: true
use_style()
fig, ax = plt.subplots()
steps = torch.arange(60)
ax.plot(steps, gains(0.0), color=COLOUR["noise"], label="Q = 0")
for q_value, style in ((0.01, ":"), (0.1, "--"), (1.0, "-")):
    ax.plot(steps, gains(q_value), style, color=COLOUR["posterior"], label=f"Q = {q_value} h²")
ax.set(xlabel="layers or steps", ylabel="gain K [1]", ylim=(0, 0.7))
ax.legend(ncols=2)
plt.show()

# %%
torch.testing.assert_close(gains(0.0), 1 / (steps + 2.0))

# %% [markdown]
# ## The fixed point
#
# With $\rho = (1+J)^2$ the cycle is the map
#
# $$F(\lambda) = \left(\frac{\rho}{\lambda + \lambda_{\text{obs}}} + Q\right)^{-1}. \tag{13.7}$$
#
# **Claim.** For $Q > 0$ it has exactly one positive fixed point,
#
# $$\lambda^\star = \frac{-c + \sqrt{c^2 + 4 Q \lambda_{\text{obs}}}}{2Q}, \qquad c = \rho + Q\lambda_{\text{obs}} - 1, \tag{13.8}$$
#
# and every start converges to it. This is a scalar Riccati equation, the steady state of the Kalman filter [@anderson1979].

# %%
growth = sp.Symbol("rho", positive=True)
cycle = 1 / (growth / (lam + lam_obs) + q)
c = growth + q * lam_obs - 1
quadratic = q * lam**2 + c * lam - lam_obs
prove(sp.fraction(sp.together(cycle - lam))[0] + quadratic)

# %% [markdown]
# Fixed points are the roots of $Q\lambda^2 + c\lambda - \lambda_{\text{obs}}$. Their product, the last coefficient over the first, is negative, so one root is positive and one is negative: **unique**. The positive one is

# %%
lam_star = (-c + sp.sqrt(c**2 + 4 * q * lam_obs)) / (2 * q)
lam_minus = (-c - sp.sqrt(c**2 + 4 * q * lam_obs)) / (2 * q)
prove(quadratic.subs(lam, lam_star)), prove(lam_star * lam_minus + lam_obs / q)

# %% [markdown]
# **Stable.** The slope of the map is $F'(\lambda) = \rho F^2/(\lambda + \lambda_{\text{obs}})^2$:

# %%
prove(sp.diff(cycle, lam) - growth * cycle**2 / (lam + lam_obs) ** 2)

# %% [markdown]
# At the fixed point $F = \lambda$, so $\rho = (1/\lambda - Q)(\lambda + \lambda_{\text{obs}})$, and the slope becomes a product of two numbers in $(0, 1)$: the relative distance from the bound $1/Q$, and the share of the prior, $1 - K^\star$.
#
# $$F'(\lambda^\star) = (1 - Q\lambda^\star)\,(1 - K^\star) < 1 \tag{13.9}$$

# %%
at_fixed_point = growth * lam**2 / (lam + lam_obs) ** 2
prove(at_fixed_point.subs(growth, (1 / lam - q) * (lam + lam_obs)) - (1 - q * lam) * lam / (lam + lam_obs))

# %% [markdown]
# **From every start.** $F$ rises (its slope is positive) and is concave, with $F(0) > 0$ and one crossing of the diagonal: from below $\lambda^\star$ the sequence rises to it, from above it falls to it.

# %%
curvature = -2 * growth * q / (growth + q * (lam + lam_obs)) ** 3
prove(sp.diff(cycle, lam, 2) - curvature)

# %% [markdown]
# For $Q = 0$ the quadratic becomes linear: $\lambda^\star = \lambda_{\text{obs}}/(\rho - 1)$ if the dynamics stretch, and no finite fixed point, i.e. freezing, if they do not:

# %%
sp.solve(quadratic.subs(q, 0), lam)


# %%
#| exports
def fixed_point(
    lam_obs: Float[Tensor, "..."],  # observation precision λ_obs > 0, the same at every step, [h⁻²]
    jac: Float[Tensor, "..."],  # J, no unit
    q: Float[Tensor, "..."],  # process noise Q ≥ 0, [h²]
) -> Float[Tensor, "..."]:  # λ*, [h⁻²]; infinite where Q = 0 and |1 + J| ≤ 1
    "The one positive fixed point (13.8) of observe, update, predict with constant inputs: a scalar Riccati equation [@anderson1979]. `ValueError`, on a CPU, unless λ_obs is positive and finite and Q ≥ 0."
    lam_obs, q = at_least_float32(lam_obs), at_least_float32(q)
    check_precision(lam_obs, "lam_obs")
    check_not_negative(q, "process noise")
    growth = (1 + at_least_float32(jac)).square().clamp(min=MIN_GROWTH)
    c = growth + q * lam_obs - 1
    root = torch.sqrt(c.square() + 4 * q * lam_obs)
    shrinking = c < 0  # each branch of the root is used where it does not cancel
    large = (root - c) / (2 * torch.where(shrinking, q, 1.0))
    return torch.where(shrinking, large, 2 * lam_obs / torch.where(shrinking, 1.0, c + root))

# %% [markdown]
# The two forms of the root in the code are the same number; each is used where it does not subtract nearly equal numbers.

# %%
prove(lam_star - 2 * lam_obs / (c + sp.sqrt(c**2 + 4 * q * lam_obs)))

# %%
assert_same(lam_star.subs(growth, (1 + J) ** 2), (lam_obs, J, q), fixed_point)

# %%
star = fixed_point(torch.tensor(1.0), torch.tensor([-0.3, 0.0, 0.5]), torch.tensor([0.1, 0.1, 0.0]))
torch.testing.assert_close(propagate(star + 1.0, torch.tensor([-0.3, 0.0, 0.5]), torch.tensor([0.1, 0.1, 0.0])), star)
star

# %% [markdown]
# The curves of @fig-freeze with $Q > 0$ end at their fixed points, and @fig-map shows how the cycle gets there. With $\lambda_{\text{obs}} = 1$ and $J = 0$ the gains settle at

# %%
q_values = torch.tensor([0.01, 0.1, 1.0])
settled = gain(fixed_point(torch.ones(3), torch.zeros(3), q_values), torch.ones(3))
torch.testing.assert_close(gains(0.1)[-1], settled[1])
settled

# %%
#| label: fig-map
#| fig-cap: "One cycle of observe, update, predict pulls every precision to the one fixed point; with Q = 0 the map stays above the diagonal and there is none."
#| code-fold: true
axis = torch.linspace(0, 8, 161)
cycle_of = lambda lam, q: propagate(lam + 1.0, torch.tensor(0.0), torch.tensor(q))
fig, ax = plt.subplots()
ax.plot(axis, axis, color=COLOUR["prior"], linewidth=1)
ax.plot(axis, cycle_of(axis, 0.0), color=COLOUR["noise"], label="Q = 0")
ax.plot(axis, cycle_of(axis, 0.1), color=COLOUR["posterior"], label="Q = 0.1 h²")
for start in (0.2, 7.5):
    path = [torch.tensor(start)]
    for _ in range(12):
        path += [path[-1], cycle_of(path[-1], 0.1)] if len(path) == 1 else [cycle_of(path[-1], 0.1)]
    xs = [p for p in path[1:] for _ in range(2)]
    ax.plot(xs[:-1], xs[1:], color=COLOUR["observation"], linewidth=0.8)
end_point = fixed_point(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.1))
ax.plot(end_point, end_point, "o", color=COLOUR["posterior"])
ax.set(xlabel=r"precision before the cycle, $\lambda$ [h$^{-2}$]", ylabel=r"after the cycle, $F(\lambda)$ [h$^{-2}$]", ylim=(0, 8))
ax.legend()
plt.show()

# %% [markdown]
# ## Where first order breaks
#
# The delta method sees the slope at one point. Where the slope changes within the width of the belief, the method is wrong. The simplest case can be done exactly: $x \to x + x^2/2$ at $h = 0$ has $J = 0$, so (13.1) leaves the variance $\sigma^2$ unchanged;
# the true variance is $\sigma^2 + \sigma^4/2$. The moments of a standard normal variable, by integration:

# %%
z_std, sigma = sp.Symbol("z", real=True), sp.Symbol("sigma", positive=True)
mean_of = lambda expr: sp.integrate(sp.expand(expr) * sp.exp(-(z_std**2) / 2) / sp.sqrt(2 * sp.pi), (z_std, -sp.oo, sp.oo))
squared = sigma * z_std + (sigma * z_std) ** 2 / 2
prove(mean_of(squared**2) - mean_of(squared) ** 2 - (sigma**2 + sigma**4 / 2))


# %% [markdown]
# The mean is off as well, by $\sigma^2/2$ here: to first order a belief's mean moves along the map, not along the average of the map. For other branches we measure the ratio of the true output variance to that of (13.1) by simulation (@fig-delta):


# %%
def variance_ratio(branch, h, sd, n=100_000):
    z = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = h + sd * (z - z.mean()) / z.std()  # exact first two moments: less simulation noise
    at = torch.tensor(h, dtype=torch.float64, requires_grad=True)
    (jac,) = torch.autograd.grad(branch(at), at)
    return ((x + branch(x)).var() * propagate(torch.tensor(sd**-2, dtype=torch.float64), jac, torch.tensor(0.0))).item()


# %%
BRANCHES = {
    "quadratic, x²/2 at 0": (lambda x: x.square() / 2, 0.0),
    "GELU at 0": (F.gelu, 0.0),
    "ReLU, kink 0.5 above": (lambda x: torch.relu(x), -0.5),
    "ReLU, kink 0.5 below": (lambda x: torch.relu(x), 0.5),
}

# %%
#| label: fig-delta
#| fig-cap: "The delta method is right for narrow beliefs, and off, up to a factor of three in these four cases, for beliefs wider than the distance over which the slope changes."
#| code-fold: true
widths = torch.logspace(-2, 0.3, 24).tolist()
fig, ax = plt.subplots()
for (name, (branch_of, at)), role in zip(BRANCHES.items(), ("posterior", "truth", "baseline", "noise"), strict=True):
    ax.plot(widths, [variance_ratio(branch_of, at, sd) for sd in widths], color=COLOUR[role], label=name)
ax.axhline(1, color=COLOUR["prior"], linewidth=1)
ax.set(xscale="log", xlabel="standard deviation of the belief [h]", ylabel="true variance / delta method [1]", ylim=(0, 3.2))
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# At a tenth of the distance to the kink the ReLU is exact; once the belief straddles the kink, the slope that counts is neither of the two. The numbers at widths 0.05, 0.5 and 2:

# %%
ratios = {name: [round(variance_ratio(*case, sd), 2) for sd in (0.05, 0.5, 2.0)] for name, case in BRANCHES.items()}
ratios

# %%
assert all(abs(narrow - 1) < 0.01 for narrow, _, _ in ratios.values())
assert abs(ratios["quadratic, x²/2 at 0"][2] - (1 + 2.0**2 / 2)) < 0.1
assert ratios["ReLU, kink 0.5 below"][2] < 0.8 and ratios["ReLU, kink 0.5 above"][2] > 1.5

# %% [markdown]
# One would expect a wide network to be milder than a single unit, since many kinks at many places average out; this chapter does not measure it. Where the true variance is the larger one, a learnt $Q$ can make up for what the first order misses; where it is the smaller one, nothing does.
#
# ## Assumptions, and where they break
#
# - **First order.** Right while the slope is constant over the width of the belief.
# - **Diagonal.** Variance that comes in from other features is dropped; it is positive, and $Q$ stands in for it.
# - **Elementwise activation.** A callable that mixes features gets a wrong slope from the fallback, without a warning.
# - **$J$ near $-1$.** The branch cancels the feature, and (13.1) would claim perfect knowledge. $Q$ bounds the claim; with $Q = 0$ the clamp does.
#
# ## Summary
#
# - The precision follows the slope of the dynamics, $\lambda'' = ((1+J)^2/\lambda' + Q)^{-1}$, and never exceeds $1/Q$.
# - Without process noise the gain falls to zero; with it, the cycle has one stable fixed point in closed form.
# - The exact diagonal of a feed-forward Jacobian, behind its norm, costs two matmuls (three when gated).
#
# ## Exercises
#
# **1.** How many steps does the cycle need to halve its distance from the fixed point, at $\lambda_{\text{obs}} = 1$, $J = 0$, $Q = 0.1$? Use (13.9) and check it by running the cycle.
#
# <details><summary>Answer</summary>
#
# $\ln 2 / (-\ln F')$ steps:

# %%
rate = (1 - 0.1 * end_point) * (1 - gain(end_point, torch.tensor(1.0)))
one_cycle = cycle_of(end_point + 1e-2, 0.1) - end_point
rate, one_cycle / 1e-2, torch.log(torch.tensor(0.5)) / rate.log()

# %% [markdown]
# </details>
#
# **2.** Which $Q$ makes the steady gain equal $K^\star = 1/2$ when $J = 0$? Solve it with SymPy.
#
# <details><summary>Answer</summary>
#
# A gain of one half means $\lambda^\star = \lambda_{\text{obs}}$. The update doubles the precision, and the noise must halve it again:

# %%
sp.solve((quadratic.subs(growth, 1)).subs(lam, lam_obs), q)

# %% [markdown]
# </details>
#
# **3.** How large is the norm's correction in a layer of width 64 with 256 ReLU units, at torch's initialisation? Compare $J$ with and without it.
#
# <details><summary>Answer</summary>

# %%
torch.manual_seed(0)
first, second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
with torch.no_grad():
    x_hat, inv_std = standardise(torch.randn(32, 64))
    pre = first(x_hat)
    jac = ffn_jacobian(pre, first.weight, second.weight, norm="layer", xhat=x_hat, inv_std=inv_std, a_zero=first.bias)
    plain = inv_std * ffn_jacobian(pre, first.weight, second.weight)
((plain - jac).norm() / jac.norm()).item()

# %% [markdown]
# </details>
#
# **4.** Is $(1 + J)^2/\lambda$ an upper or a lower bound of the first-order variance when the other features are uncertain too? Give the exact first-order variance for a $2 \times 2$ Jacobian.
#
# <details><summary>Answer</summary>
#
# A lower bound: what is dropped is a square over a precision.

# %%
J12, lam_2 = sp.Symbol("J_12", real=True), sp.Symbol("lambda_2", positive=True)
first_order = (sp.Matrix([[1 + J, J12]]) * sp.diag(1 / lam, 1 / lam_2) * sp.Matrix([1 + J, J12]))[0]
prove(first_order - (1 + J) ** 2 / lam - J12**2 / lam_2)

# %% [markdown]
# </details>
