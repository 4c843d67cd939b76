# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Notation
#
# > Every letter of the book: what it is called in three fields, its unit, its name in the code, and where it first appears.

# %% [markdown]
# **So far** nothing: this is the first page. **Now** the words and letters. **Why**: the book joins geostatistics, filtering and transformers, and each of the three has its own names for the same few things.
# Read the next two tables once and come back when a letter is new. This chapter exports nothing to the library.
#
# The book is about one idea of the paper [@bft2026]: a token carries a *mean* and a *precision*, and a layer of a transformer is one step of a filter, **observe → update → predict**.
#
# A mark says where a statement comes from: **[P]** from the paper, **[D]** from this book, which derived or chose it where our source, a summary of the paper, is silent. A statement without a mark is common knowledge of its field, given with a reference.

# %%
import torch
from jaxtyping import Float
from torch import Tensor

# %% [markdown]
# ## One table, three fields
#
# | Geostatistics | Filtering | Transformer | Symbol | Code | Unit |
# |:--|:--|:--|:--|:--|:--|
# | value at a site | state estimate | residual stream of a token | $h$ | `h`, `Belief.mean` | [h] |
# | inverse error variance of a sample | precision, information | none: every token counts as certain | $\lambda$ | `lam`, `Belief.precision` | [h⁻²] |
# | reliability of a neighbouring sample | precision of another state | none | $\bar\lambda_j$ | `lam_bar` | [h⁻²] |
# | closeness to a neighbour | relevance of a neighbour | attention weight, softmax of the logits | $\alpha_{tj}$ | `alpha` | [1] |
# | kriging weight | share of a sensor in the fused measurement | attention weight corrected by precision | $w_{tj}$ | `w` | [1] |
# | sample | sensor reading | value vector of a key | $v_j$ | `v` | [v] |
# | kriging estimate | innovation: what the measurement adds | output of self-attention | $e_t$ | `e` | [v] |
# | kriging variance | claimed measurement variance | none | $s_0^2$ | `s2_0` | [h²], read as [v²] |
# | weighted sum of squares | scatter of the sensors | none | $S$ | `S` | [v²] |
# | effective number of samples | effective number of sensors | how many keys attention looks at | $n$, $\kappa = 1/n$ | `n_eff`, `kappa` | [1] |
# | inverse of the estimated kriging variance | measurement precision | none | $\lambda_{\text{obs}}$ | `lam_obs` | [v⁻²] |
# | weight of the data against the trend | Kalman gain | gate of the residual connection, fixed at 1 | $K$ | `gain` | [1] |
# | kriging with a prior mean | update, analysis | residual connection around attention | $h' = h + K e$ | `update` | [h] |
# | none | dynamics, linearised | feed-forward branch, diagonal of its Jacobian | $J$ | `jac` | [1] |
# | none | process noise | none | $Q$ | `q` | [h²] |
# | none | prediction, forecast | residual connection around the feed-forward network | $h'' = h' + f(h')$ | `predict` | [h] |
# | inverse prior variance | initial precision | precision of an embedding | $\tau$ | `tau` | [h⁻²] |
#
# The transformer column says "none" where an ordinary transformer assumes $\lambda \equiv 1$ and $K \equiv 1$: it is the degenerate case of the filter **[P]**.
#
# **Units.** The residual stream has no physical unit, and yet units keep formulas honest: [h] stands for whatever the residual stream is measured in, [v] for the values of an attention head, [1] for a pure number.
# The examples with thermometers put °C for both. A precision is an inverse square, so that precision times variance is a pure number:

# %%
sd = torch.tensor(0.5)  # [°C]
precision = sd**-2  # [°C⁻²]
precision * sd**2  # [1]

# %% [markdown]
# ## Axes
#
# Shapes are written with one letter per axis. The letters live in type annotations only, never in formulas:
#
# | Axis | Runs over | Axis | Runs over |
# |:--|:--|:--|:--|
# | `b` | sequences of a batch | `d` | features of the residual stream |
# | `h` | attention heads | `k` | features of one head (queries, keys, values) |
# | `t` | queries: tokens that look | `f` | hidden units of the feed-forward network |
# | `j` | keys: tokens looked at | `v` | items of the vocabulary |
# | `kv` | features of a value, where they may be others than a query's | `r` | variances of a head: one, or one a feature |
# | `hk` | features of all heads, side by side | | |
#
# `*batch` stands for any number of leading axes, `*#batch` for axes that may broadcast (have length one or be missing), and `...` for any shape.
# An annotation states the shape, and the comment behind it the meaning, the symbol and the unit:


# %%
def attend(
    w: Float[Tensor, "*batch t j"],  # attention weights, w, [1]
    v: Float[Tensor, "*#batch j k"],  # values, v, [v]
) -> Float[Tensor, "*batch t k"]:  # estimate, e, [v]
    return w @ v


# %%
w, v = torch.full((2, 4, 3, 5), 1 / 5), torch.ones(2, 1, 5, 8)  # 2 sequences, 4 heads, 3 queries, 5 keys, 8 features
attend(w, v).shape

# %% [markdown]
# The annotation is a type, so Python can check whether a tensor matches it:

# %%
isinstance(w, Float[Tensor, "b h t j"]), isinstance(w, Float[Tensor, "b t d"])

# %% [markdown]
# ## Every symbol of Parts I and II
#
# In the order of their appearance. "First" is the chapter. A letter with two meanings is listed twice; where one chapter needs both, it says which.
#
# ### The state
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $h$, $h_t$ | mean of a token's belief, the residual stream; $h'$ after the update, $h''$ after the prediction | [h] | 01 | [P] |
# | $\lambda$, $\lambda_t$ | precision of a token's belief, per feature; $\lambda'$ after the update, $\lambda''$ after the prediction | [h⁻²] | 01 | [P] |
# | $d$ | number of features of the residual stream | [1] | 01 | common |
# | $t$; $i$, $j$ | index of a query; indices of keys, or of features ($i$, $k$ in 13) | | 01, 10 | common |
#
# ### Observing: chapters 10 and 11
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $q_t$, $k_j$ | query and key vectors, of width $k$ | | 10 | common |
# | $\ell_{tj}$ | logit: scaled dot product $q_t \cdot k_j/\sqrt{k}$ | [1] | 10 | common |
# | $\alpha_{tj}$ | relevance: softmax of the logits | [1] | 10 | common |
# | $\bar\lambda_j$ | reliability of key $j$: its precision averaged over features | [h⁻²] | 10 | [P] |
# | $w_{tj}$, $w_j$ | kriging weight, $\propto \alpha_{tj}\bar\lambda_j$ | [1] | 10 | [P] |
# | $T$ | number of keys a query may see; in 20 also the length of a sequence | [1] | 10 | common |
# | $v_j$ | value of key $j$ | [v] | 10 | common |
# | $\mu$ | what the values have in common, their expectation | [v] | 10 | common |
# | $p_j$ | $\alpha_j\bar\lambda_j$, precision of key $j$ up to a common factor | [h⁻²] | 10 | [D] |
# | $\sigma^2$ | variance of one value, [v²]; where $\operatorname{Var} v_j = \sigma^2/p_j$, a pure factor | [v²] or [1] | 10 | common |
# | $e_t$, $e$ | kriging mean, $\sum_j w_j v_j$ | [v] | 10 | [P] |
# | $\operatorname{E}$ or $E$, $\operatorname{Var}$, $\operatorname{Cov}$ | expectation, variance, covariance | | 10 | common |
# | $\eta$ | Lagrange multiplier of the constraint $\sum_j w_j = 1$ | [v²] | 10 | common |
# | $\delta_j$ | change of a weight | [1] | 10 | [D] |
# | $s_0^2$ | variance that the tracked precision claims, $\sum_j w_j/\bar\lambda_j$; scale of the prior in 11 | [h²], read as [v²] | 10 | [D] |
# | $n$, $n_t$ | effective sample size, $1/\sum_j w_j^2$ | [1] | 10 | [P] |
# | $\kappa$ | $1/n = \sum_j w_j^2$ | [1] | 10 | [D] |
# | $C$, $c$, $\mathbf 1$ | covariance matrix of the neighbours, covariance with the target, vector of ones | [v²], [v²], [1] | 10 | common |
# | $\rho$ | correlation of two neighbours | [1] | 10 | common |
# | $c$ | any positive factor (exercises) | [1] | 10 | |
# | $S$, $S_t$ | scatter, $\sum_j w_j (v_j - e)^2$ | [v²] | 11 | [P] |
# | $z_j$ | independent standard variable, $v_j = \mu + \sigma z_j$ | [1] | 11 | common |
# | $N(\mu, \sigma^2)$ | normal distribution | | 11 | common |
# | $s^2_{\text{REML}}$ | restricted maximum likelihood estimate of $\sigma^2$, $S/(1 - 1/n)$ | [v²] | 11 | REML [P], form [D] |
# | $P$, $Q_e$ | $\sum_j p_j$ and $\sum_j p_j (v_j - e)^2$, sums of the precision reading | | 11 | [D] |
# | $\sigma_e^2$ | $\operatorname{Var} e$ as an unknown of its own | [v²] | 11 | [D] |
# | $\nu_0$ | degrees of freedom of the prior of $\sigma^2$, 1 unless stated | [1] | 11 | prior [P], value [D] |
# | $\chi^2$, $\nu$, $s^2$ | the scaled inverse-$\chi^2$ distribution, its degrees of freedom and its scale | [1], [v²] | 11 | common |
# | $s^2_{\text{post}}$ | scale of the posterior of $\sigma^2$ | [v²] | 11 | [D] |
# | $\theta$ | $1/\sigma^2$ as a variable | [v⁻²] | 11 | common |
# | $\lambda_{\text{obs}}$ | precision of the observation $e$ | [v⁻²] | 11 | [P], form [D] |
#
# ### Updating: chapter 12
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $x$ | the true state | [h] | 12 | common |
# | $z$ | a measurement of it; $e = z - h$ is the innovation | [h] | 12 | common |
# | $K$, $K^\star$ | Kalman gain, $\lambda_{\text{obs}}/(\lambda + \lambda_{\text{obs}})$; with a star where another gain may be applied instead | [1] | 12 | [P] |
# | $\circ$ | product element by element | | 12 | common |
#
# ### Predicting: chapter 13
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $f$, $f(h')$ | the branch added by the feed-forward network, norm included; as an index, a hidden unit | [h] | 13 | common |
# | $J$, $J_i$ | diagonal of its Jacobian, $\partial f_i/\partial h'_i$ | [1] | 13 | [P] |
# | $\tilde\lambda''$ | precision after the dynamics without noise | [h⁻²] | 13 | [P] |
# | $Q$ | process noise, a variance per feature | [h²] | 13 | [P] |
# | $\varepsilon$ | error of the mean, $x = h' + \varepsilon$ | [h] | 13 | common |
# | $\delta_{ik}$ | 1 if $i = k$, else 0 | [1] | 13 | common |
# | $\varphi$, $\varphi'$ | activation function and its slope | | 13 | common |
# | $\Phi$, $\phi$, $s$, $\pi$ | distribution function and density of the standard normal, the sigmoid, and 3.14… in the slopes of activations | [1] | 13 | common |
# | $W_1, b_1, W_2, b_2$; $W_g, W_u, W_d$ | weights and biases of the feed-forward network; of SwiGLU | | 13 | common |
# | $a$; $g$, $u$ | pre-activations; of SwiGLU. $a^0$ or $b_f$, $g^0$, $u^0$: their value at $\hat x = 0$. In the slope of GELU, $u$ is the argument of tanh and $t$ its value | | 13 | common |
# | $\hat x$, $s$, $\mu$ | normalised features, the root mean square divided by, the mean subtracted | [1], [h], [h] | 13 | common |
# | $\gamma$, $\beta$, $\epsilon$ | weight and bias of the norm layer, its small constant | | 13 | common |
# | $G$, $\bar G$, $M$ | folded first matrix, its row means, the matrix of the diagonal Jacobian; $M^g$, $M^u$ of SwiGLU | | 13 | [D] |
# | $F$ | one cycle of observing and predicting as a map of $\lambda$ | [h⁻²] | 13 | [D] |
# | $\lambda^\star$, $K^\star$ | fixed point of the cycle and its gain | [h⁻²], [1] | 13 | [D] |
# | $\rho$, $c$ | in the fixed point: $(1 + J)^2$, and the middle coefficient of its quadratic | [1] | 13 | [D] |
# | $n$, $\lambda_0$ | number of cycles, precision before the first | [1], [h⁻²] | 13 | [D] |
#
# ### Unnormalised attention: chapter 14
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $a_{tj}$ | weight without softmax, of either sign | [1] | 14 | common |
# | $N$ | constant it is divided by, the longest history | [1] | 14 | common |
# | $b_{tj}$, $b_j$ | $a_{tj}\bar\lambda_j$ | | 14 | [D] |
# | $m$, $m_0$ | centre of the values, and its stand-in where signs cancel | [v] | 14 | [D] |
# | $r_j$ | residual $v_j - m$ | [v] | 14 | common |
# | $B_2$ | matrix of the $b_{tj}^2$ | | 14 | [D] |
# | $V$, $V_0$ | sandwich variance of $e$, and the variance the tracked precision claims for it | [v²] | 14 | sandwich [P], $V_0$ [D] |
# | $X$, $W$ | design and weight matrices of a regression | | 14 | common |
# | $\epsilon_j$, $\sigma_j^2$ | error of key $j$ and its variance | [v], [v²] | 14 | common |
# | $\ell_j$ | leverage of key $j$ | [1] | 14 | common |
# | $g$ | exponent of a simulation | [1] | 14 | [D] |
#
# ### The layer: chapters 20 to 22
#
# | Symbol | Meaning | Unit | First | Whose |
# |:--|:--|:--|:--|:--|
# | $V^+$, $wV^+$ | values with the columns $v^2$ and $1/\bar\lambda$ appended, and the moments that the weights make of them | | 20 | [D] |
# | $L$; $G^+$, $g_\kappa$ | a loss; its gradients by $wV^+$ and by $\kappa$ | | 20 | common |
# | $g$, $u_j$ | in the proof of the backward pass: gradient by one moment, and that moment's column of $V^+$ | | 20 | common |
# | $c_t$ | what the softmax Jacobian subtracts from every $\partial L/\partial w_{tj}$ | | 20 | common |
# | $H$ | number of heads | [1] | 21 | common |
# | $W_O$, $b_O$ | matrix and bias of the output projection | [h/v], [h] | 21 | common |
# | $e_k$, $o_i$ | in the output projection: value dimension $k$ of all heads, feature $i$ of its output | [v], [h] | 21 | common |
# | $J_i$ | in a post-norm layer also: diagonal of the Jacobian of the norm itself | [1/h] | 21 | [D] |
# | $\tau$ | initial precision of an item | [h⁻²] | 22 | [P] |
#
# A hat, as in $\widehat{\operatorname{Var}}$, marks an estimate; $\propto$ means "up to a factor that all keys share"; $\top$ transposes.
#
# ## Words
#
# - *Precision*: inverse variance. Not floating-point precision, which the book calls by its dtype.
# - *Key* and *neighbour* are one thing; so are *query* and *target*, *value* and *sample*.
# - *Claim*: what tracked precisions say about an error. *Scatter*: what the values show.
# - *Reliability* ($\bar\lambda$) belongs to the key alone; *relevance* ($\alpha$) to a query and a key.
#
# ## Summary
#
# - $h$ and $\lambda$ travel together: mean [h] and precision [h⁻²] of a token.
# - One table translates between geostatistics, filtering and transformers; "none" marks what an ordinary transformer lacks.
# - Axis letters live in annotations, symbols in formulas, and every symbol of chapters 10–22 is listed above.
#
# ## Exercises
#
# **1.** What unit does $\lambda_{\text{obs}}/(\lambda + \lambda_{\text{obs}})$ have, and what must hold of [v] and [h]?
#
# <details><summary>Answer</summary>
#
# None, provided [v] = [h]. The output projection of attention is what turns one into the other. With one precision in degrees and the other in millidegrees the sum is meaningless, and the gain depends on the unit chosen:

# %%
gain = lambda lam, lam_obs: lam_obs / (lam + lam_obs)
gain(1.0, 4.0), gain(1.0, 4.0e-6)  # the same observation in °C⁻² and in m°C⁻²

# %% [markdown]
# </details>
#
# **2.** Which annotation fits the logits of a batch of sequences with several heads, and which their sum over keys?
#
# <details><summary>Answer</summary>

# %%
logits = torch.zeros(2, 4, 3, 5)
isinstance(logits, Float[Tensor, "b h t j"]), isinstance(logits.sum(-1), Float[Tensor, "b h t"])

# %% [markdown]
# </details>
