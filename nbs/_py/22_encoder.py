# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A drop-in encoder
#
# > `BFTEncoderLayer` and `BFTEncoder` replace torch's `TransformerEncoderLayer` and `TransformerEncoder`: same arguments, same parameters, plus a precision.

# %%
#| default_exp encoder

# %% [markdown]
# **So far** a filter step on beliefs (chapter 21). **Now** the step gets parameters and becomes a `torch.nn` module.
# **Why** a drop-in: a claim about a layer can only be tested by changing the layer and nothing else. The class below *is* torch's layer, by inheritance: the same constructor, the same parameter names, so that a trained plain layer can be loaded into it. It adds one parameter vector, the process noise.

# %%
#| exports
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bft_nb.attention import check_options, observe
from bft_nb.core import Belief, at_least_float32, certain, check_belief, check_count, check_flag, check_option, check_positive
from bft_nb.dynamics import activation_and_slope, ffn_jacobian, predict, standardise
from bft_nb.kalman import update
from bft_nb.layer import Step, normalise, project, reliability

# %%
import matplotlib.pyplot as plt
from fastcore.test import test_fail

from bft_nb.figures import COLOUR, use_style

# %%
use_style()

# %% [markdown]
# ## Where precision starts
#
# Each token needs a precision before the first layer, $\tau > 0$ [h⁻²]. The paper names two ways: one number per item, or a small network on the embedding **[P]**. A constant is the third, for comparison **[D]**.
# All three learn $\log\tau$, which may be any real number. (An *item* is what a sequence consists of in Part III; read "word" if you come from language.)


# %%
#| exports
PADDING_PRECISION = 1e-6  # [h⁻²], the least of the range that the library promises; padding is masked as well


# %%
#| exports
class ItemPrecision(nn.Module):
    "τ per item: `log_tau` (v + 1, 1), one learned number for each item; index 0 is padding [@bft2026]."

    def __init__(
        self,
        num_items: int,  # v, without padding
        init: float | Float[Tensor, "v"] = 1.0,  # τ at the start, one for all or one per item, > 0
    ):
        super().__init__()
        check_count("num_items", num_items)
        start = torch.full((num_items,), float(init)) if isinstance(init, Real) else init
        if not isinstance(start, Tensor) or start.shape != (num_items,) or not bool((torch.isfinite(start) & (start > 0)).all()):
            raise ValueError(f"init must be a positive, finite number or a tensor of {num_items} of them, got {init!r}")
        start = at_least_float32(start)
        log_tau = torch.cat([start.new_tensor([PADDING_PRECISION]), start]).log()
        self.log_tau = nn.Embedding.from_pretrained(log_tau[:, None], freeze=False, padding_idx=0)

    def forward(
        self,
        items: Int[Tensor, "b t"],  # item of each token
        embedding: Float[Tensor, "b t d"],  # gives width and dtype
    ) -> Float[Tensor, "b t d"]:
        if items.shape != embedding.shape[:-1]:
            raise ValueError(f"items and embedding must agree in batch and time, got {tuple(items.shape)} and {tuple(embedding.shape)}")
        try:
            return at_least_float32(self.log_tau(items)).exp().expand(embedding.shape)
        except IndexError as error:
            wrong = items[(items < 0) | (items >= self.log_tau.num_embeddings)][0].item()
            raise ValueError(f"items must be ids 0 (padding) … {self.log_tau.num_embeddings - 1}, got {wrong}") from error

    @property
    def tau(self) -> Float[Tensor, "v"]:
        "τ of each item, without padding, [h⁻²]."
        return self.log_tau.weight[1:, 0].exp()


# %% [markdown]
# The precision per item can start from log item frequency **[P]**. A reason for this: what has been seen often is known well (the mean of $n$ readings has a precision proportional to $n$, chapter 10), and the logarithm keeps rare items within reach of training. The 2 that is added to the count leaves a positive precision to an item never seen. Here are the values for items seen 0, 10 and 1,000 times:

# %%
counts = torch.tensor([0.0, 10.0, 1000.0])
ItemPrecision(3, (2 + counts).log()).tau.detach()

# %% [markdown]
# This is a start, not a result: the paper finds that rare items *end* with the higher precision **[P]**. The other two ways:


# %%
#| exports
class MLPPrecision(nn.Module):
    "τ from the embedding by a small network, starting at one everywhere [@bft2026]: parameters independent of the number of items."

    def __init__(
        self,
        d_model: int,  # d
        hidden: int = 16,  # width of the network
    ):
        super().__init__()
        check_count("d_model", d_model)
        check_count("hidden", hidden)
        self.net = nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, 1))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, items: Int[Tensor, "b t"], embedding: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        with torch.autocast(embedding.device.type, enabled=False):
            return at_least_float32(self.net(embedding.to(self.net[0].weight.dtype))).exp().expand(embedding.shape)


# %%
#| exports
class ConstantPrecision(nn.Module):
    "One learned τ for all tokens: `log_tau`, a single number."

    def __init__(
        self,
        init: float = 1.0,  # τ at the start, > 0
    ):
        super().__init__()
        check_positive("init", init)
        self.log_tau = nn.Parameter(torch.tensor(math.log(init)))

    def forward(self, items: Int[Tensor, "b t"], embedding: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return at_least_float32(self.log_tau).exp().expand(embedding.shape)


# %%
tau = MLPPrecision(4)(torch.tensor([[1, 2]]), torch.randn(1, 2, 4))
tau.shape, tau.unique().detach()

# %% [markdown]
# ## What is asked of torch's modules
#
# The layer inherits torch's attention `self_attn`, its network `linear1`, `linear2` and its norms `norm1`, `norm2`, and computes with their parameters. First the masks: torch's encoder says `True` where a key must *not* be seen, its attention function (and chapter 20) `True` where it *may* be.


# %%
#| exports
def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean (True = hidden) or floating point (added to the logits), got {mask.dtype}")


# %%
#| exports
def _additive(mask: Tensor) -> Tensor:
    "A mask as numbers to add, −∞ where it hides: a sum may be of a wider dtype, in which the least number of its own hides nothing."
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


# %%
#| exports
def _attention_mask(mask: Tensor | None, padding: Tensor | None, b: int, t: int, heads: int) -> Tensor | None:
    "torch.nn's masks (True or −inf hides) as one mask for `observe` (True shows), or None."
    masks = []
    if mask is not None:
        _check_mask("mask", mask, [(t, t), (b * heads, t, t)])
        masks.append(mask.reshape(-1, heads if mask.dim() == 3 else 1, t, t))
    if padding is not None:
        padding = padding[None] if padding.dim() == 1 else padding
        _check_mask("src_key_padding_mask", padding, [(b, t)])
        masks.append(padding[:, None, None, :])
    if all(m.dtype == torch.bool for m in masks):
        return ~torch.stack(torch.broadcast_tensors(*masks)).any(0) if len(masks) == 2 else ~masks[0] if masks else None
    return sum(map(_additive, masks))


# %%
_attention_mask(None, torch.tensor([[False, False, True]]), 1, 3, 2)

# %% [markdown]
# Torch keeps the three projections of attention in one matrix, head after head:


# %%
#| exports
def _heads(
    attn: nn.MultiheadAttention,
    x: Float[Tensor, "b t d"],  # input, normalised if the layer normalises first
) -> tuple[Float[Tensor, "b h t k"], Float[Tensor, "b h t k"], Float[Tensor, "b h t k"]]:
    "Queries, keys and values."
    qkv = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return q, k, v


# %% [markdown]
# `observe` may shift all values by a constant near them (chapter 20). One such constant that depends on no token at all is the value of an average token, whose normalised features are all zero:


# %%
#| exports
def _value_of_average_token(
    attn: nn.MultiheadAttention,
    norm: nn.LayerNorm | None,  # what stands in front of attention, if anything
) -> Float[Tensor, "h 1 k"]:
    "v at normalised features of zero, without gradient."
    w = attn.in_proj_weight.chunk(3)[2]
    bias = w.new_zeros(len(w)) if attn.in_proj_bias is None else attn.in_proj_bias.chunk(3)[2]
    if norm is not None and norm.bias is not None:
        bias = F.linear(norm.bias, w, bias)
    return bias.detach().view(attn.num_heads, 1, -1)


# %% [markdown]
# The Jacobian (13.5) needs the pre-activation $a$, which the network has computed anyway, and its value at $\hat x = 0$:


# %%
#| exports
def _network_jacobian(
    layer: nn.TransformerEncoderLayer,
    h: Float[Tensor, "b t d"],  # what enters the network's branch, [h]
    a: Float[Tensor, "b t f"],  # the pre-activation
) -> Float[Tensor, "b t d"]:
    "J of the network, behind its norm if that comes first."
    w1, b1, w2, norm = layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.norm2
    if not layer.norm_first:
        return ffn_jacobian(a, w1, w2, layer.activation)
    xhat, inv_std = standardise(h, "layer", norm.eps)
    a_zero = b1 if norm.bias is None else F.linear(norm.bias, w1, b1)
    return ffn_jacobian(a, w1, w2, layer.activation, norm="layer", xhat=xhat, inv_std=inv_std, norm_weight=norm.weight, a_zero=a_zero)


# %% [markdown]
# Last, the layout. Torch takes the batch as first or second axis, or a single sequence without a batch; one function brings all of them to (b, t, d) and back.

# %%
#| exports
def _batch_first(src: Tensor | Belief, layer: nn.TransformerEncoderLayer, precision: Tensor | None = None) -> tuple[Belief, Callable[[Belief], Tensor | Belief]]:
    "A belief on (b, t, d), and the way back to the layout and type of `src`."
    if not isinstance(src, Belief | Tensor):
        raise TypeError(f"src must be a tensor or a Belief, got {type(src).__name__}")
    if isinstance(src, Belief) and precision is not None:
        raise ValueError("src is a Belief and has a precision: give a tensor with precision=, or a Belief alone")
    belief = src if isinstance(src, Belief) else certain(src) if precision is None else Belief(src, precision)
    check_belief(belief)
    if belief.mean.dim() not in (2, 3):
        raise ValueError(f"src must have two or three dimensions, got shape {tuple(belief.mean.shape)}")
    if belief.mean.shape[-1] != layer.norm1.normalized_shape[0]:
        raise ValueError(f"src must have d_model={layer.norm1.normalized_shape[0]} features, got shape {tuple(belief.mean.shape)}")
    if belief.mean.dim() == 2:
        there, back = (lambda x: x.unsqueeze(0)), (lambda x: x.squeeze(0))
    elif layer.batch_first:
        there = back = lambda x: x
    else:
        there = back = lambda x: x.transpose(0, 1)
    pick = (lambda b: Belief(*map(back, b))) if isinstance(src, Belief) else (lambda b: back(b.mean))
    return Belief(*map(there, belief)), pick


# %% [markdown]
# ## The layer
#
# With these, the two branches of the layer are short. Attention observes, with dropout on what it delivers:


# %%
#| exports
def _observe_branch(layer: nn.TransformerEncoderLayer, belief: Belief, mask: Tensor | None, padding: Tensor | None, is_causal: bool) -> tuple[Belief, Tensor]:
    "e and λ_obs in the residual stream, and n_eff per head."
    attn, norm = layer.self_attn, layer.norm1 if layer.norm_first else None
    x = belief.mean if norm is None else norm(belief.mean)
    lam_bar = reliability(belief) if layer.kriging else torch.ones_like(belief.precision[..., 0])
    allowed = _attention_mask(mask, padding, x.shape[0], x.shape[1], attn.num_heads)
    shift = _value_of_average_token(attn, norm)
    seen = observe(*_heads(attn, x), lam_bar, mask=allowed, is_causal=is_causal, shift=shift, **layer.observing)
    e, lam_obs = project(seen, attn.out_proj.weight, attn.out_proj.bias)
    return Belief(layer.dropout1(e), lam_obs), seen.n_eff


# %% [markdown]
# The network predicts: the mean as torch's own block has it, the precision through the Jacobian:


# %%
#| exports
def _predict_branch(layer: nn.TransformerEncoderLayer, belief: Belief, carry: bool) -> Belief:
    "The prediction; with `carry=False`, where nobody reads it, the precision stays as it was."
    a, jac = layer.linear1(layer.norm2(belief.mean) if layer.norm_first else belief.mean), torch.zeros(())
    if carry and layer.jacobian != "none":
        with torch.set_grad_enabled(torch.is_grad_enabled() and layer.jacobian == "full"):
            jac = _network_jacobian(layer, belief.mean, a)
    delta = layer.dropout2(layer.linear2(layer.dropout(layer.activation(a))))
    return predict(belief, delta, jac, layer.process_noise) if carry else Belief(belief.mean + delta, belief.precision)


# %%
#| exports
def _check_sizes(d_model: int, nhead: int, dim_feedforward: int, dropout: float) -> None:
    for name, size in (("d_model", d_model), ("nhead", nhead), ("dim_feedforward", dim_feedforward)):
        check_count(name, size)
    if d_model % nhead:
        raise ValueError(f"d_model must be divisible by nhead, got {d_model} and {nhead}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie in 0 … 1, got {dropout!r}")


# %% [markdown]
# The class joins the two branches. The only parameter it adds is `raw_noise`, one number per feature, whose softplus is the process noise $Q$ **[P]**. It starts at $Q = 0.1$ **[D]**: no belief then leaves the prediction with a precision above 10 (chapter 13).
# The options after the star take the layer apart, one idea at a time. Read `step` first: it is the three lines of chapter 21, with the norms of a post-norm layer between them.


# %%
#| exports
class BFTEncoderLayer(nn.TransformerEncoderLayer):
    """A filter step with torch's encoder-layer interface: tensor in, tensor out; `Belief` in, `Belief` out [@bft2026].

    Arguments up to `dtype` are `torch.nn.TransformerEncoderLayer`'s. Dropout acts on e and on the network, never on the
    kriging weights, which must sum to one. To stack layers, use `BFTEncoder` or hand on a `Belief`: every layer that gets a
    tensor starts from λ = 1. Raises `ValueError` for options out of range."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,  # or a name of chapter 13: torch's two, "gelu_tanh", "silu"
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        kriging: bool = True,  # weigh keys by reliability; False: λ̄ = 1 for all, in the weights and in what they claim
        kalman: bool = True,  # gain λ_obs/(λ + λ_obs); False: the mean takes gain one, the plain residual; the precision goes on as before
        jacobian: str = "detached",  # J of the network: "full", "detached" (no gradient through it) or "none" (J = 0)
        process_noise: float = 0.1,  # Q at the start, per feature, ≥ 0 [h²]; 0: none, and not learned
        resolution: str = "diagonal",  # of λ_obs, "diagonal" or "isotropic", chapter 20
        weights: str = "reliability",  # reading of the weights, "reliability" or "precision", chapter 11
        nu0: float = 1.0,  # ν₀, degrees of freedom of the prior, > 0
        impl: str = "blocked",  # of `observe`
    ):
        _check_sizes(d_model, nhead, dim_feedforward, dropout)
        for name, flag in (("batch_first", batch_first), ("norm_first", norm_first), ("bias", bias), ("kriging", kriging), ("kalman", kalman)):
            check_flag(name, flag)
        check_positive("layer_norm_eps", layer_norm_eps, zero=True)
        check_positive("process_noise", process_noise, zero=True)
        check_option("jacobian", jacobian, ("detached", "full", "none"))
        check_options(resolution, weights, nu0, impl)
        activation = activation_and_slope(activation)[0]
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)
        self.activation_relu_or_gelu = 0  # or torch's own encoder would hand over nested tensors
        self.batch_first = batch_first
        self.kriging, self.kalman, self.jacobian = kriging, kalman, jacobian
        self.observing: dict[str, Any] = {"resolution": resolution, "weights": weights, "nu0": nu0, "impl": impl}
        start = torch.full((d_model,), process_noise + math.log(-math.expm1(-process_noise)) if process_noise else 0.0, device=device)
        self.raw_noise = nn.Parameter(start) if process_noise else None

    @property
    def process_noise(self) -> Tensor:
        "Q per feature, [h²]; zero if the layer has none."
        return torch.zeros(()) if self.raw_noise is None else F.softplus(self.raw_noise)

    def forward(
        self,
        src: Tensor | Belief,  # (b, t, d), or (t, b, d) without `batch_first`, or (t, d)
        src_mask: Tensor | None = None,  # (t, t) or (b·h, t, t); True or −inf hides
        src_key_padding_mask: Tensor | None = None,  # (b, t); True hides
        is_causal: bool = False,  # query t sees keys j ≤ t only; needs no mask
    ) -> Tensor | Belief:  # as `src`
        "One filter step. Raises `ValueError` or `TypeError` for masks that do not fit."
        belief, restore = _batch_first(src, self)
        step = self.step(belief, src_mask, src_key_padding_mask, is_causal, carry=isinstance(src, Belief))
        return restore(step.predicted)

    def step(self, belief: Belief, mask=None, padding=None, is_causal: bool = False, carry: bool = True) -> Step:
        "The same on (b, t, d), with everything the layer saw. `carry=False` leaves out the prediction of the precision."
        observation, n_eff = _observe_branch(self, belief, mask, padding, is_causal)
        posterior = update(belief, observation)
        if not self.kalman:
            posterior = posterior._replace(mean=belief.mean + observation.mean)
        after = posterior if self.norm_first else normalise(posterior, self.norm1)
        predicted = _predict_branch(self, after, carry)
        return Step(belief, observation, n_eff, posterior, predicted if self.norm_first else normalise(predicted, self.norm2))


# %% [markdown]
# ## The encoder
#
# A stack of layers through which one belief runs. The precision that leaves the last layer feeds nothing in an ordinary model, so the last layer's process noise would never get a gradient (and distributed training would complain): it stays frozen at its initial value.

# %%
#| exports
class BFTEncoder(nn.TransformerEncoder):
    "A stack of `BFTEncoderLayer`s with torch's encoder interface: tensor in, tensor out; `Belief` in, `Belief` out [@bft2026]."

    def __init__(
        self,
        encoder_layer: BFTEncoderLayer,  # copied `num_layers` times
        num_layers: int,
        norm: nn.LayerNorm | nn.RMSNorm | None = None,  # after the last layer
        enable_nested_tensor: bool = True,  # accepted for torch's sake, without effect
        mask_check: bool = True,  # likewise
    ):
        if not isinstance(encoder_layer, BFTEncoderLayer):
            raise TypeError(f"encoder_layer must be a BFTEncoderLayer, got {type(encoder_layer).__name__}")
        check_count("num_layers", num_layers)
        width = encoder_layer.norm1.normalized_shape
        if norm is not None and (not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or norm.normalized_shape != width):
            raise TypeError(f"norm must be a LayerNorm or RMSNorm over {width[0]} features, or None, got {norm}")
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        if self.layers[-1].raw_noise is not None:
            self.layers[-1].raw_noise.requires_grad_(False)

    def forward(
        self,
        src: Tensor | Belief,  # (b, t, d), or (t, b, d) without `batch_first`, or (t, d)
        mask: Tensor | None = None,  # (t, t) or (b·h, t, t); True or −inf hides
        src_key_padding_mask: Tensor | None = None,  # (b, t); True hides
        is_causal: bool | None = None,  # query t sees keys j ≤ t only; needs no mask
        *,
        precision: Tensor | None = None,  # λ of a tensor `src`, same shape; the result is a tensor, and cheaper than a `Belief`
        with_intermediates: bool = False,  # also return one `Step` per layer
    ) -> Tensor | Belief | tuple[Tensor | Belief, list[Step]]:
        "Filter a sequence. Raises `ValueError` or `TypeError` for masks or precisions that do not fit."
        belief, restore = _batch_first(src, self.layers[0], precision)
        steps, carry = [], isinstance(src, Belief) or with_intermediates
        for layer in self.layers:
            steps.append(layer.step(belief, mask, src_key_padding_mask, bool(is_causal), carry or layer is not self.layers[-1]))
            belief = steps[-1].predicted
        if self.norm is not None:
            belief = normalise(belief, self.norm) if carry else belief._replace(mean=self.norm(belief.mean))
        return (restore(belief), steps) if with_intermediates else restore(belief)


# %% [markdown]
# Parameters of precision live on a logarithmic scale, on which one unit is a factor of $e$; embeddings move by hundredths. They therefore deserve a learning rate of their own, and no weight decay (which would pull $\tau$ towards one). This function yields them:

# %%
#| exports
def precision_parameters(
    module: nn.Module,  # any model that holds layers or initial precisions of this chapter
) -> Iterator[nn.Parameter]:
    "The parameters that set a precision: log τ and the raw process noise."
    for part in module.modules():
        if isinstance(noise := getattr(part, "raw_noise", None), nn.Parameter):
            yield noise
        elif isinstance(part, (ItemPrecision, MLPPrecision, ConstantPrecision)):
            yield from part.parameters()


# %% [markdown]
# ## Lessons
#
# **The ordinary encoder is a special case [P].** With kriging and gain switched off, an encoder that holds a plain encoder's weights gives a plain encoder's output. Only the process noise is missing in the plain encoder's state:

# %%
torch.manual_seed(0)
shape = dict(d_model=16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True, norm_first=True)
plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False)
degenerate = BFTEncoder(BFTEncoderLayer(**shape, kriging=False, kalman=False), 2)

# %%
degenerate.load_state_dict(plain.state_dict(), strict=False)

# %%
x = torch.randn(3, 5, 16)
torch.testing.assert_close(degenerate(x, is_causal=True), plain(x, mask=nn.Transformer.generate_square_subsequent_mask(5)))

# %% [markdown]
# **The filter looks at precision.** Two copies of one sequence; in the second, token 3 has a twentieth of the precision.

# %%
filter_ = BFTEncoder(BFTEncoderLayer(**shape), 2)
filter_.load_state_dict(plain.state_dict(), strict=False)
lam = torch.ones(2, 5, 16)
lam[1, 2] = 0.05
with torch.no_grad():
    _, steps = filter_(Belief(x[:1].expand(2, 5, 16), lam), with_intermediates=True)

# %% [markdown]
# All tokens listen to token 3 less: in the first layer the effective sample size, averaged over heads and tokens, falls by most of a key.

# %%
n_eff = steps[0].n_eff.mean((1, 2))
assert n_eff[1] < n_eff[0] - 0.5
n_eff

# %% [markdown]
# And token 3 listens to the others more (@fig-gain):

# %%
#| label: fig-gain
#| fig-cap: "The unreliable token has the largest gain: gain of the first layer, mean over features, with all precisions equal (blue) and with a twentieth of the precision for token 3 (orange)."
#| code-fold: true
fig, ax = plt.subplots()
for row, role, label in ((0, "posterior", "all tokens alike"), (1, "baseline", "token 3 unreliable")):
    ax.plot(range(1, 6), steps[0].gain[row].mean(-1), "o-", color=COLOUR[role], label=label)
ax.set(xlabel="token", ylabel="gain K [1]", ylim=(0.85, 1.005), xticks=range(1, 6))
ax.legend(loc="lower right")
plt.show()
assert steps[0].gain[1].mean(-1).argmax() == 2

# %% [markdown]
# The gain is high everywhere: averaging over four keys and a fresh $W_O$ with small entries leave little variance beside a prior variance of one.

# %% [markdown]
# **Bad input is refused by name.**

# %%
test_fail(lambda: BFTEncoderLayer(10, 3), contains="got 10 and 3")
test_fail(lambda: filter_(Belief(x, -torch.ones_like(x))), contains="precision must be positive")
test_fail(lambda: filter_(x, src_key_padding_mask=torch.zeros(3, 4, dtype=torch.bool)), contains="src_key_padding_mask must have shape (3, 5), got (3, 4)")
test_fail(lambda: filter_(x, mask=torch.zeros(5, 5).long()), contains="got torch.int64")
test_fail(lambda: ItemPrecision(3, -1.0), contains="positive")

# %% [markdown]
# ## Assumptions, and where they break
#
# - Gradients do not flow through the Jacobian by default (`jacobian="full"` lets them): the network is trained for its prediction, not for making its own slope small **[D]**, which is also cheaper.
# - The Jacobian is that of the network without dropout.
# - With `kalman=False` the gain is off its optimum, and by Joseph's form (12.5) only $\lambda_{\text{obs}}$ would be left of the precision. The option changes the mean alone, so that an ablation changes one thing **[D]**; the `gain` of `Step` is then the gain that was not applied.
# - `kriging=False` takes reliability out of attention altogether: the weights are plain, and the prior of $\lambda_{\text{obs}}$ (chapter 11) knows no reliability either. With `kalman=False` as well, this second change has no effect on the mean **[D]**.
# - Torch's layer drops attention weights as well as features of $e$; this one drops features of $e$ alone. A comparison must keep that difference in mind, and the recommendation experiment has a row for it.
#
# ## Summary
#
# - `BFTEncoderLayer` is torch's layer plus a process noise; switched off, it computes what torch's layer computes, but for the dropout of attention weights in training, which it does without.
# - `ItemPrecision`, `MLPPrecision` and `ConstantPrecision` say where precision starts.
# - `with_intermediates=True` opens the filter: gain, effective sample size and precision per layer.
#
# ## Exercises
#
# **1.** How many parameters does the filter add to a layer of width 16, and which share of the layer is that?
#
# <details><summary>Answer</summary>

# %%
layer = filter_.layers[0]
added, total = layer.raw_noise.numel(), sum(p.numel() for p in layer.parameters())
added, added / total

# %% [markdown]
# One number per feature, 0.7 % here. At width 64 with a network of 256 it is 0.13 % of a layer, and it falls with the width. The paper states less than 0.1 % extra parameters **[P]**. Whether a model keeps to that depends on where its precision starts: `ItemPrecision` adds one number per item to the $d$ of its embedding, 1.6 % of the table at width 64; `MLPPrecision` adds a fixed number however many items there are.
#
# </details>
