# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sequential backbones
#
# > A history of items goes in, a state per position comes out, and the next item is the one whose embedding points the same way.

# %%
#| default_exp backbones

# %% [markdown]
# **So far** we have interactions, split into a past to learn from and a future to predict. **Now** we need a model that reads a past.
# **Why** three: SASRec [@kang2018sasrec] is the transformer reduced to what recommendation needs, and the reference that every published comparison starts from. BERT4Rec [@sun2019bert4rec] changes what a position may see, HSTU [@zhai2024] what it does with what it sees. The paper claims its filter for all of them.
# Each comes plain and filtering, and the two differ in the class of their layers, and in the initial precision that the filter's need, in nothing else, so that a difference in their results has one cause.

# %%
#| hide
import warnings

# %%
#| hide
# the progress bars of the libraries below miss the notebook widgets, which this book does not use
warnings.filterwarnings("ignore", message="IProgress not found")

# %%
#| exports
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import PyTorchModelHubMixin
from jaxtyping import Float, Int
from torch import Tensor, nn

from bft_nb.attention import NO_EVIDENCE, Observation
from bft_nb.core import Belief, at_least_float32, check_count, check_flag, check_option, check_positive
from bft_nb.dynamics import norm_jacobian, propagate, standardise
from bft_nb.encoder import BFTEncoder, BFTEncoderLayer, ConstantPrecision, ItemPrecision, MLPPrecision
from bft_nb.kalman import update
from bft_nb.layer import LEAST_VARIANCE, Step, normalise, reliability
from bft_nb.sandwich import posterior_variance

# %% [markdown]
# ## The smallest case
#
# A catalogue of six items, and two users. Ida watched items 2, 5 and 1; Bo watched item 4. Items are numbered from 1: 0 is *padding*, the filler that makes rows of different length one tensor.

# %%
histories = torch.tensor([[2, 5, 1], [4, 0, 0]])
(histories != 0).sum(1)


# %% [markdown]
# The filler carries no information, so it must have no influence, neither by its amount nor by its side. Everything in this chapter that looks like bookkeeping serves that one requirement.
#
# ## One side for the padding
#
# Some libraries fill on the left, others on the right. A stable sort on "is this padding?" moves the real items to the front and keeps their order:

# %%
#| exports
def align_left(
    items: Int[Tensor, "b t"],  # item ids, 0 is padding anywhere
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:  # real items first; where each came from
    "Move each row's real items to the front, in order, and say where they were."
    order = (items == 0).to(torch.int8).argsort(dim=1, stable=True)
    return items.gather(1, order), order


# %%
align_left(torch.tensor([[0, 0, 4], [2, 5, 1]]))[0]

# %% [markdown]
# With real items in front and a causal mask, no real position can see a padded one: a separate padding mask is not needed, and no row of attention is ever empty.
#
# ## A causal encoder
#
# Position $t$ may look at positions $j \le t$ [@kang2018sasrec]:
#
# $$M_{tj} = \begin{cases} 0 & j \le t \\ -\infty & j > t \end{cases} \tag{31.1}$$

# %%
nn.Transformer.generate_square_subsequent_mask(3)


# %% [markdown]
# The layers are torch's own, pre-norm ($h + \text{block}(\text{norm}(h))$), with a final norm [@xiong2020prenorm]:


# %%
#| exports
def plain_encoder(
    d: int,  # width
    n_layers: int,
    n_heads: int,
    d_ff: int,  # width of the feed-forward network
    dropout: float,
    norm_first: bool = True,  # pre-norm with a final norm; False: post-norm
) -> nn.TransformerEncoder:  # GELU, batch first
    "The ordinary encoder, from torch's own classes."
    layer = nn.TransformerEncoderLayer(d, n_heads, d_ff, dropout, "gelu", batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(d) if norm_first else None, enable_nested_tensor=False)


# %%
sum(p.numel() for p in plain_encoder(64, 2, 2, 64, 0.0).parameters())


# %% [markdown]
# The filtering encoder (chapter 22) takes the same arguments; its options come after them:


# %%
#| exports
def filter_encoder(
    d: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    dropout: float,
    norm_first: bool = True,
    **options,  # further arguments of `BFTEncoderLayer`
) -> BFTEncoder:
    "The same stack with filtering layers: only the class differs."
    layer = BFTEncoderLayer(d, n_heads, d_ff, dropout, "gelu", batch_first=True, norm_first=norm_first, **options)
    return BFTEncoder(layer, n_layers, nn.LayerNorm(d) if norm_first else None, enable_nested_tensor=False)


# %% [markdown]
# What it adds is a process noise per feature and layer (that of the last layer is fixed, since no observation follows it):

# %%
extra = dict(filter_encoder(64, 2, 2, 64, 0.0).named_parameters())
{name: tuple(p.shape) for name, p in extra.items() if "noise" in name}


# %% [markdown]
# A filter needs a precision to start from. This $\tau$ either belongs to the item (how much does this item's embedding tell?), or is computed from the embedding, or is one number for all [@bft2026]:


# %%
#| exports
def initial_precision(
    kind: str,  # "item", "mlp" or "constant"
    n_items: int,
    d: int,
    init: float,  # τ at the start; with "mlp" only 1 is possible
) -> nn.Module:  # items, embedding -> τ
    "The module that gives each token its first precision τ; `ValueError` for an unknown kind or an init it can't have."
    if kind == "item":
        return ItemPrecision(n_items, init)
    if kind == "mlp" and init == 1:
        return MLPPrecision(d)
    if kind == "constant":
        return ConstantPrecision(init)
    raise ValueError(f'precision must be "item", "mlp" (with precision_init=1) or "constant", got {kind!r} with precision_init={init}')


# %% [markdown]
# $\tau$ per item "can start from log item frequency" [P]. Our reading [D]: the better an item is known, the more its prior is worth. We take $\tau_i \propto \log(2 + n_i)$ for $n_i$ training interactions, scaled to geometric mean one, so that the common level is that of a start at $\tau = 1$ for all. The 2 keeps $\tau$ positive for an item never seen.

# %%
#| exports
def frequency_precision(
    counts: Int[np.ndarray, "padded"],  # training interactions per item, entry 0 is padding
) -> Float[Tensor, "v"]:  # τ of items 1 … v, [h⁻²]
    "Initial precisions by log frequency, of geometric mean one, for `ItemPrecision(v, init=…)` [@bft2026]; `ValueError` for a negative count or none."
    if counts.ndim != 1 or len(counts) < 2 or counts.min() < 0:
        raise ValueError(f"counts must be counts of padding and at least one item, got shape {counts.shape}" + (f" with {counts.min()}" if counts.size else ""))
    log_tau = torch.from_numpy(np.log(np.log(2.0 + counts[1:]))).float()
    return (log_tau - log_tau.mean()).exp()


# %%
frequency_precision(np.array([0, 0, 5, 50, 500]))

# %%
from fastcore.test import test_fail

# %%
torch.testing.assert_close(frequency_precision(np.array([0, 3, 3])), torch.ones(2))
test_fail(lambda: inspect.unwrap(frequency_precision)(np.array([0, -1])), contains="-1")


# %% [markdown]
# ## What every backbone does
#
# The item's embedding plus a learned position, then dropout, then the encoder. The score of item $i$ after position $t$ is the inner product with the item's own embedding [@kang2018sasrec]:
#
# $$x_t = \sqrt d\, m_{i_t} + p_t, \qquad r_{ti} = h_t^\top m_i \tag{31.2}$$
#
# The same $m$ serves at both ends and has two jobs: at the input it must be large enough to be heard beside the position, at the output small enough for scores near zero at the start of training. The factor $\sqrt d$ at the input, which the authors' program has too, reconciles the two: at first an item is heard $\sqrt d$ times louder than its position.
#
# Initialisation [D]: embeddings and positions $\mathcal N(0, 0.02^2)$, the padding row zero, the layers as torch makes them. Positions count from the first item of the (cut) history.

# %%
#| exports
def check_sizes(n_items: int, max_length: int, d: int, n_layers: int, n_heads: int, d_ff: int | None, dropout: float) -> None:
    "Raise `ValueError` or `TypeError` for a model that can't be built, naming the argument."
    sizes = {"n_items": n_items, "max_length": max_length, "d": d, "n_layers": n_layers, "n_heads": n_heads, "d_ff": d if d_ff is None else d_ff}
    for name, value in sizes.items():
        check_count(name, value)
    if d % n_heads:
        raise ValueError(f"d must be divisible by n_heads, got d={d} and n_heads={n_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


# %%
#| exports
def check_filter_options(
    options: dict[str, Any],  # of the filtering layers
    bft: bool,  # are there any?
    layer: type[nn.Module] = BFTEncoderLayer,  # their class
) -> None:
    "Raise `TypeError` for options a plain model can't have, or that the filtering layer does not know."
    allowed = [p.name for p in inspect.signature(layer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in options if name not in allowed]:
        raise TypeError(f"unknown option {unknown[0]!r} (allowed: {', '.join(allowed)})")
    if options and not bft:
        raise TypeError(f"{', '.join(options)}: options of the filtering layers need bft=True")


# %% [markdown]
# Training makes inputs and labels from whole sequences. The common way is to predict, after each item, the next one: the labels are the sequence shifted by one place.

# %%
#| exports
def next_item(
    sequences: Int[Tensor, "b t1"],  # right-padded with 0
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:  # items; labels, 0 where there is nothing to predict
    "Inputs and labels of next-item training [@kang2018sasrec]: the sequence without its last item, and without its first."
    labels = sequences[:, 1:]
    return sequences[:, :-1].where(labels != 0, 0), labels


# %%
next_item(torch.tensor([[2, 5, 1], [4, 3, 0]]))


# %% [markdown]
# The rest is the same for all. A backbone adds three things: its encoder, what the encoder is told about which position may look at which (`visible`), and, if it does not learn by next items, its own `training_batch`.

# %%
#| exports
class Backbone(nn.Module, PyTorchModelHubMixin):
    "What the backbones share: items and positions in (31.2), one state per position out, scores against the items' own embedding."

    special = 0  # ids after the last item that are not items, each with a position of its own: 1 for a mask
    filter_layer: type[nn.Module] = BFTEncoderLayer  # whose options `options` are

    def __init__(
        self,
        build: Callable[[], nn.Module],  # makes the encoder
        n_items: int,
        max_length: int,
        d: int,
        n_layers: int,
        n_heads: int,
        d_ff: int | None,
        dropout: float,
        bft: bool,
        precision: str,
        precision_init: float,
        options: dict[str, Any],  # of the filtering layers
    ):
        super().__init__()
        check_sizes(n_items, max_length, d, n_layers, n_heads, d_ff, dropout)
        check_flag("bft", bft)
        check_option("precision", precision, ("item", "mlp", "constant"))
        check_positive("precision_init", precision_init)
        check_filter_options(options, bft, self.filter_layer)
        self.n_items, self.max_length, self.bft = n_items, max_length, bft
        self.item_embedding = nn.Embedding(n_items + 1 + self.special, d, padding_idx=0)
        self.position_embedding = nn.Embedding(max_length + self.special, d)
        self.dropout = nn.Dropout(dropout)
        self.encoder = build()
        self.precision = initial_precision(precision, n_items + self.special, d, precision_init) if bft else None
        self.reset_embeddings()

    def reset_embeddings(self) -> None:
        "Draw embeddings and positions from N(0, 0.02²), padding zero."
        for embedding in (self.item_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        with torch.no_grad():
            self.item_embedding.weight[0] = 0

    def item_weights(self) -> Float[Tensor, "v d"]:
        "The output embedding $m$, row 0 is padding, row i item i."
        return self.item_embedding.weight[: self.n_items + 1]

    def item_precision(self) -> Float[Tensor, "v"]:
        "Initial precision τ by item, entry 0 is padding; `TypeError` for a plain model."
        if self.precision is None:
            raise TypeError(f"a plain {type(self).__name__} tracks no precision: make it with bft=True")
        items = torch.arange(self.n_items + 1, device=self.item_embedding.weight.device)[None]
        return self.precision(items, self.embed_items(items))[0, :, 0]

    def check_ids(self, items: Int[Tensor, "..."], special: int = 0) -> None:
        "Raise `TypeError` or `ValueError` for ids this model does not know."
        if not isinstance(items, Tensor) or items.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"items must be a tensor of int64 or int32, got {items.dtype if isinstance(items, Tensor) else type(items).__name__}")
        wrong = (items < 0) | (items > self.n_items + special)
        if bool(wrong.any()):
            raise ValueError(f"items must be ids 0 (padding) or 1..{self.n_items}, got {int(items[wrong][0])}")

    def check_items(self, items: Int[Tensor, "b t"]) -> None:
        "Raise `TypeError` or `ValueError` for ids or lengths this model does not know."
        self.check_ids(items, self.special)
        if items.ndim != 2:
            raise ValueError(f"items must have shape (batch, time), got {tuple(items.shape)}")
        if items.shape[1] > self.max_length + self.special:
            raise ValueError(f"a history of {items.shape[1] - self.special} items is longer than max_length={self.max_length}: keep the most recent ones")

    def check_histories(self, items: Int[Tensor, "b t"]) -> None:
        "Raise `TypeError` or `ValueError` for what is no batch of histories of items, each with one position at least."
        self.check_ids(items)
        if items.ndim != 2 or not items.shape[1]:
            raise ValueError(f"items must have shape (batch, time) with one position at least, got {tuple(items.shape)}")
        if items.shape[1] > self.max_length:
            raise ValueError(f"a history of {items.shape[1]} items is longer than max_length={self.max_length}: keep the most recent ones")

    def training_batch(
        self,
        sequences: Int[Tensor, "b t1"],  # whole sequences, right-padded with 0, at most max_length + 1
        generator: torch.Generator | None = None,  # of whatever is random about it
    ) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:  # items for `forward`; labels, 0 where there is none
        "What `bft_nb.training` learns from: `next_item`, unless the backbone says otherwise."
        return next_item(sequences)

    def n_targets(
        self,
        lengths: Int[np.ndarray, " n"],  # items per sequence
    ) -> float:  # expected number of labels of all of them together
        "How many labels `training_batch` gives on average."
        return float((lengths - 1).sum())

    def embed_items(self, items: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        "Embeddings as large as the encoder hears them, √d m (31.2)."
        return self.item_embedding(items) * self.item_embedding.embedding_dim**0.5

    def embed(self, items: Int[Tensor, "b t"]) -> Tensor | Belief:
        "Input $x$ of the encoder (31.2), after dropout; with its initial precision if the encoder filters."
        embedding = self.embed_items(items)
        positions = torch.arange(items.shape[1], device=items.device)
        x = self.dropout(embedding + self.position_embedding(positions))
        return x if self.precision is None else Belief(x, self.precision(items, embedding))

    def visible(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None) -> dict[str, Any]:
        "Arguments of the encoder that say who may look at whom."
        raise NotImplementedError

    def encode(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b t d"]:
        "States of left-aligned histories, before padding is blanked."
        x = self.embed(items)
        if isinstance(x, Belief):
            return self.encoder(x.mean, precision=x.precision, **self.visible(items, times))
        return self.encoder(x, **self.visible(items, times))

    def filter(
        self,
        items: Int[Tensor, "b t"],  # left-aligned, 0 is padding
        times: Int[Tensor, "b t"] | None = None,  # of each item [s]; for a model with `time_buckets`
    ) -> tuple[Belief, list[Step]]:  # final belief; per layer: prior, observation, n_eff, posterior, predicted
        "What a filtering model believes at each position and how it got there; `TypeError` for a plain model, `ValueError` for padding in front of an item."
        self.check_items(items)
        if bool(((items[:, :-1] == 0) & (items[:, 1:] != 0)).any()):
            raise ValueError("filter needs left-aligned histories, with padding behind them only: see align_left")
        x = self.embed(items)
        if not isinstance(x, Belief):
            raise TypeError(f"a plain {type(self).__name__} tracks no precision: make it with bft=True")
        return self.encoder(x, with_intermediates=True, **self.visible(items, times))

    def forward(
        self,
        items: Int[Tensor, "b t"],  # histories, 0 is padding on either side
        times: Int[Tensor, "b t"] | None = None,  # of each item [s]; for a model with `time_buckets`
    ) -> Float[Tensor, "b t d"]:  # $h_t$; zero where items are padding
        "State after each item of each history; `ValueError` if longer than `max_length`, `TypeError` for non-integers."
        self.check_items(items)
        pad = (items == 0).unsqueeze(-1)
        if not bool((pad[:, :-1] & ~pad[:, 1:]).any()):
            return self.encode(items, times).masked_fill(pad, 0)
        aligned, order = align_left(items)
        hidden = self.encode(aligned, None if times is None else times.gather(1, order))
        back = order.argsort(dim=1).unsqueeze(-1).expand_as(hidden)
        return hidden.gather(1, back).masked_fill(pad, 0)

    def last(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b d"]:
        "State from which the next item is predicted: that of the most recent item; zero for an empty history. `ValueError` unless there is a position to look at."
        self.check_histories(items)
        position = torch.arange(items.shape[1], device=items.device)
        index = torch.where(items != 0, position, 0).amax(1)
        return self(items, times)[torch.arange(len(items), device=items.device), index]

    def scores(
        self,
        hidden: Float[Tensor, "... d"],  # states, from `forward` or `last`
        items: Int[Tensor, "... v"] | None = None,  # only these items; None: the whole catalogue
    ) -> Float[Tensor, "... v"]:  # $r$ (31.2); without `items`, column i is item i and column 0 is −inf
        "Scores of items, equation (31.2). `ValueError` for ids or a width the model does not have."
        if hidden.shape[-1] != self.item_embedding.embedding_dim:
            raise ValueError(f"hidden must have {self.item_embedding.embedding_dim} features, got shape {tuple(hidden.shape)}")
        if items is not None:
            self.check_ids(items)
            return (self.item_weights()[items] @ hidden.unsqueeze(-1)).squeeze(-1)
        scores = hidden @ self.item_weights().T
        scores[..., 0] = -torch.inf
        return scores


# %% [markdown]
# ## SASRec
#
# The first backbone is (31.1) and (31.2) and nothing else; mask and scores are the authors' [@kang2018sasrec]. Ours are GELU in place of their ReLU, torch's pre-norm layer (`norm_first=False`: post-norm), positions counted from the first item, and a sampled softmax in place of their binary cross-entropy with one negative **[D]**. All three backbones share these choices, so that they differ in what they are named for.

# %%
#| exports
class SASRec(Backbone):
    "Self-attentive sequential recommendation [@kang2018sasrec], plain or filtering: causal, learns every next item."

    def __init__(
        self,
        n_items: int,  # items are 1..n_items, 0 is padding
        max_length: int = 50,  # longest history the positions cover
        d: int = 64,  # width
        n_layers: int = 2,
        n_heads: int = 2,
        d_ff: int | None = None,  # width of the feed-forward network; None: as wide as `d`
        dropout: float = 0.3,  # on the embedding and inside the layers
        norm_first: bool = True,  # pre-norm with a final norm; False: post-norm
        bft: bool = False,  # filtering layers in place of torch's
        precision: str = "item",  # where τ comes from: "item", "mlp" or "constant"; with `bft` only
        precision_init: float = 1.0,  # τ at the start; with `bft` only
        **options,  # further arguments of `BFTEncoderLayer`; with `bft` only
    ):
        check_flag("norm_first", norm_first)
        build = partial(filter_encoder if bft else plain_encoder, d, n_layers, n_heads, d if d_ff is None else d_ff, dropout, norm_first=norm_first, **options)
        super().__init__(build, n_items, max_length, d, n_layers, n_heads, d_ff, dropout, bft, precision, precision_init, options)

    def visible(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None) -> dict[str, Any]:
        "Each position looks at itself and back (31.1)."
        if self.bft:
            return {"is_causal": True}
        weight = self.item_embedding.weight
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1], device=weight.device, dtype=weight.dtype)
        return {"is_causal": True, "mask": mask}


# %% [markdown]
# Six items, eight features. The first column is the padding, which no ranking may contain:

# %%
torch.manual_seed(0)
model = SASRec(n_items=6, max_length=5, d=8).eval()
model.scores(model.last(histories)).shape

# %% [markdown]
# Column 0 is $-\infty$. Restricting the scores to a list gives the same numbers:

# %%
state = model.last(histories).detach()
listed = torch.tensor([[3, 6], [1, 2]])
torch.testing.assert_close(model.scores(state, listed), model.scores(state).gather(1, listed))

# %% [markdown]
# ## What must not matter
#
# The side and the amount of padding, and the other histories in the batch:

# %%
alone = model(torch.tensor([[2, 5, 1]]))
left = model(torch.tensor([[0, 0, 2, 5, 1], [3, 3, 3, 3, 3]]))[:1, 2:]
right = model(torch.tensor([[2, 5, 1, 0, 0], [0, 0, 0, 0, 6]]))[:1, :3]
torch.testing.assert_close(alone, left)
torch.testing.assert_close(alone, right)

# %% [markdown]
# An empty history is a state of zeros, which prefers nothing, rather than NaN:

# %%
model.last(torch.zeros(1, 4, dtype=torch.long)).abs().max()

# %% [markdown]
# ## The past does not know the future
#
# Replace one item of a history and see which states move. @fig-causal does so for each of twelve positions:

# %%
import matplotlib.pyplot as plt

# %%
from bft_nb.figures import use_style

# %%
use_style()
torch.manual_seed(1)
twelve = SASRec(n_items=40, max_length=12, d=16).eval()
history = torch.randint(1, 41, (1, 12))
changed = history.repeat(12, 1)
changed[range(12), range(12)] = history % 40 + 1
moved = (twelve(changed) - twelve(history)).norm(dim=-1).detach()

# %%
#| label: fig-causal
#| fig-cap: "Replacing the item at one position (row) moves the states at that position and later ones (columns), and no earlier state at all."
#| code-fold: true
fig, ax = plt.subplots()
image = ax.imshow(moved.where(moved > 0, torch.nan), cmap="viridis")
ax.set(xlabel="position of the state", ylabel="position of the replaced item", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
fig.colorbar(image, label="change of the state [h]")
plt.show()

# %%
assert float(moved.tril(-1).max()) == 0

# %% [markdown]
# ## The filtering form
#
# One argument changes the class of the layers and adds the initial precision. With reliability ignored and the gain forced to one, the filter *is* the plain model: give both the same weights and they agree.

# %%
from bft_nb.encoder import precision_parameters

# %%
degenerate = SASRec(n_items=6, max_length=5, d=8, bft=True, kriging=False, kalman=False).eval()
degenerate.load_state_dict(model.state_dict(), strict=False)
torch.testing.assert_close(degenerate(histories), model(histories), atol=1e-6, rtol=1e-5)

# %% [markdown]
# The same holds for post-norm layers, where the norms come after the branches:

# %%
post, post_filter = (SASRec(n_items=6, max_length=5, d=8, norm_first=False, **kind).eval() for kind in ({}, dict(bft=True, kriging=False, kalman=False)))
post_filter.load_state_dict(post.state_dict(), strict=False)
torch.testing.assert_close(post_filter(histories), post(histories), atol=1e-6, rtol=1e-5)

# %% [markdown]
# The parameters that set a precision, which training gives a learning rate of their own:

# %%
tracked = SASRec(n_items=6, max_length=5, d=8, bft=True).eval()
[tuple(p.shape) for p in precision_parameters(tracked)]

# %% [markdown]
# These are one number per item, and a noise per feature and layer. Next, the gain of the first layer, position by position, for Ida: a first item has only itself to observe, later ones have more evidence:

# %%
belief, steps = tracked.filter(histories[:1])
steps[0].gain.mean(-1).detach()

# %% [markdown]
# ## BERT4Rec: looking both ways
#
# SASRec reads a history as it was lived, forwards. BERT4Rec [@sun2019bert4rec] lets every position look at all others, (31.1) without the triangle. Then the next item can no longer be the label: each position would see it.
# So an item is hidden. A *mask* token $[\text{M}]$, with an embedding of its own, takes its place, and the model says what stood there, from both sides. This is the cloze test of a language class:
#
# $$\mathcal L = -\sum_{t \in \mathcal M} \log p\big(i_t \mid i_{\setminus \mathcal M}\big), \qquad t \in \mathcal M \text{ with probability } \rho \tag{31.3}$$
#
# To predict the future, append a mask to the history: the blank to be filled is the next item.
# Prediction leaves the last place blank and nothing else, which masking at random rarely does. So with a small probability a sequence hides its last item alone, as the authors' program does for one sequence in eleven. Every chosen item is replaced by the mask, as in the authors' runs (language models leave or swap some). A sequence in which nothing was chosen hides its last item.

# %%
#| exports
def cloze(
    sequences: Int[Tensor, "b t"],  # right-padded with 0
    mask: int,  # id of the mask token
    mask_probability: float,  # ρ
    last_probability: float,  # of hiding the last item alone
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:  # items with blanks; labels, 0 where nothing is hidden
    "Hide items and ask for them (31.3) [@sun2019bert4rec]; every sequence hides at least one."
    real = sequences != 0
    hidden = real & (torch.rand(sequences.shape, generator=generator) < mask_probability)
    alone = (torch.rand(len(sequences), 1, generator=generator) < last_probability) | ~hidden.any(1, keepdim=True)
    last = torch.arange(sequences.shape[1]) == real.sum(1, keepdim=True) - 1
    hidden = torch.where(alone, last & real, hidden)
    return sequences.masked_fill(hidden, mask), sequences.where(hidden, 0)


# %% [markdown]
# The mask of a catalogue of six items is number 7. Two of Ida's three items are hidden here, and Bo's only one:

# %%
cloze(histories, 7, 0.5, 0.1, torch.Generator().manual_seed(1))


# %% [markdown]
# Positions, padding and scores are those of the other backbones, with one more position so that a full history has room for the mask. Padding needs care again: without the triangle it would be looked at, so it is hidden as a key. (An entirely empty row keeps one visible key, because a softmax over nothing is NaN; its states are set to zero in any case.)
# The layers are pre-norm by default, as SASRec's, so that the two differ in what they look at and what they learn from; `norm_first=False` gives the post-norm layers of the original. The original's extra output layer and item biases are left out for the same reason **[D]**.
#
# BERT4Rec learns from $\rho T$ positions of a sequence where SASRec learns from $T$, and its task changes every epoch, so it needs several times as many epochs [@petrov2022bert4rec]. Give `fit` a patience of 20 or more, where SASRec is content with 5.

# %%
#| exports
class BERT4Rec(Backbone):
    "Bidirectional sequential recommendation [@sun2019bert4rec], plain or filtering: looks both ways, learns hidden items."

    special = 1

    def __init__(
        self,
        n_items: int,  # items are 1..n_items, 0 is padding, n_items + 1 the mask
        max_length: int = 50,  # longest history, besides the mask
        d: int = 64,  # width
        n_layers: int = 2,
        n_heads: int = 2,
        d_ff: int | None = None,  # width of the feed-forward network; None: as wide as `d`
        dropout: float = 0.3,  # on the embedding and inside the layers
        mask_probability: float = 0.6,  # ρ, share of the items hidden in training; the authors take .6 on Beauty, .2 on MovieLens-1M
        last_probability: float = 0.1,  # of hiding the last item alone
        norm_first: bool = True,  # pre-norm with a final norm; False: post-norm, as the original
        bft: bool = False,  # filtering layers in place of torch's
        precision: str = "item",  # where τ comes from: "item", "mlp" or "constant"; with `bft` only
        precision_init: float = 1.0,  # τ at the start, also that of the mask; with `bft` only
        **options,  # further arguments of `BFTEncoderLayer`; with `bft` only
    ):
        check_flag("norm_first", norm_first)
        for name, p in {"mask_probability": mask_probability, "last_probability": last_probability}.items():
            if not 0 <= p <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {p}")
        build = partial(filter_encoder if bft else plain_encoder, d, n_layers, n_heads, d if d_ff is None else d_ff, dropout, norm_first=norm_first, **options)
        super().__init__(build, n_items, max_length, d, n_layers, n_heads, d_ff, dropout, bft, precision, precision_init, options)
        self.mask, self.mask_probability, self.last_probability = n_items + 1, mask_probability, last_probability

    def training_batch(self, sequences: Int[Tensor, "b t"], generator: torch.Generator | None = None) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        "Sequences with blanks and what stood there, `cloze`."
        return cloze(sequences, self.mask, self.mask_probability, self.last_probability, generator)

    def n_targets(self, lengths: Int[np.ndarray, " n"]) -> float:
        "Expected number of blanks: one if the last item is hidden alone or nothing was chosen, else ρ of the items."
        chosen = self.mask_probability * lengths + (1 - self.mask_probability) ** lengths
        return float((self.last_probability + (1 - self.last_probability) * chosen).sum())

    def visible(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None) -> dict[str, Any]:
        "All look at all but padding."
        pad = items == 0
        return {"src_key_padding_mask": pad & ~(pad.all(1, keepdim=True) & (torch.arange(items.shape[1], device=items.device) == 0))}

    def append_mask(
        self,
        items: Int[Tensor, "b t"],  # histories of at most `max_length`, 0 is padding on either side
    ) -> Int[Tensor, "b t1"]:  # left-aligned, each followed by the mask
        "Histories with a blank for the next item; raises what `check_histories` does."
        self.check_histories(items)
        aligned = nn.functional.pad(align_left(items)[0], (0, 1))
        return aligned.scatter(1, (items != 0).sum(1, keepdim=True), self.mask)

    def last(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b d"]:
        "State of the mask appended to each history; also for an empty one, whose mask stands alone."
        asked = self.append_mask(items)
        return self(asked)[asked == self.mask]


# %%
torch.manual_seed(0)
bert = BERT4Rec(n_items=6, max_length=5, d=8).eval()
bert.append_mask(histories)

# %% [markdown]
# Here the future does change the past, and that is the point. The experiment of @fig-causal again:

# %%
torch.manual_seed(1)
bert_twelve = BERT4Rec(n_items=40, max_length=12, d=16).eval()
moved_both = (bert_twelve(changed) - bert_twelve(history)).norm(dim=-1).detach()

# %%
#| label: fig-both-sides
#| fig-cap: "With BERT4Rec, replacing the item at one position (row) moves the states at all positions (columns), in both directions."
#| code-fold: true
fig, ax = plt.subplots()
image = ax.imshow(moved_both, cmap="viridis")
ax.set(xlabel="position of the state", ylabel="position of the replaced item", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
fig.colorbar(image, label="change of the state [h]")
plt.show()

# %%
assert float(moved_both.min()) > 0

# %% [markdown]
# The filtering form is again a change of layers. The mask has a precision of its own, the last entry of $\log\tau$: a blank has much to learn from its neighbours and little to tell them, and training can express this by lowering that precision.

# %%
bert_filter = BERT4Rec(n_items=6, max_length=5, d=8, bft=True, kriging=False, kalman=False).eval()
bert_filter.load_state_dict(bert.state_dict(), strict=False)
torch.testing.assert_close(bert_filter.last(histories), bert.last(histories), atol=1e-6, rtol=1e-5)
bert_filter.precision.tau

# %% [markdown]
# ## HSTU: counting instead of averaging
#
# A softmax averages: ten similar neighbours say no more than one. HSTU [@zhai2024] replaces it by a pointwise SiLU, so that the number of neighbours is heard:
#
# $$a_{tj} = \frac1N \operatorname{SiLU}\big(q_t\cdot k_j + b_{t-j} + b_{\text{time}(t,j)}\big), \qquad j \le t \tag{31.4}$$
#
# $b_{t-j}$ is one learned number per distance, and there is an optional one per interval of time. $N$ is a constant, the longest history, as in the authors' program: with the padded length of the batch in its place, a history's result would depend on its company. The inner product is not divided by $\sqrt k$.

# %%
#| exports
def pointwise_relevance(
    logits: Float[Tensor, "*batch t t"],  # q·k plus biases
    n: int,  # N
) -> Float[Tensor, "*batch t t"]:  # a of any sign, 0 for j > t
    "Causal pointwise attention (31.4) [@zhai2024]."
    return (nn.functional.silu(logits) / n).tril()


# %% [markdown]
# With equal logits of one, a third neighbour adds as much as the second did:

# %%
pointwise_relevance(torch.ones(3, 3), 3).sum(-1)


# %% [markdown]
# Time enters by the logarithm of the seconds between two items, since one minute and two minutes differ more than a year and a year plus one minute. The base 1.35 is that of the authors' program. Our interval runs between two items of the history; theirs takes the time of the item to be predicted as known, which ours does not **[D]**.

# %%
#| exports
def time_bucket(
    times: Int[Tensor, "b t"],  # of each item, non-decreasing [s]
    n: int,  # number of buckets
) -> Int[Tensor, "b t t"]:  # in 0 … n − 1, by query and key
    "Logarithmic bucket of the time between two items, log(seconds)/0.301 rounded down [@zhai2024]."
    seconds = (times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
    return (seconds.double().log() / 0.301).long().clamp(max=n - 1)


# %%
time_bucket(torch.tensor([[0, 60, 3600, 86400, 31536000]]), 128)[0, :, 0]

# %% [markdown]
# What leaves attention is a sum of unknown size, so the layer normalises it once more. Then a gate $u$, computed from the token itself, decides feature by feature what to let through. There is no feed-forward network:
#
# $$[u, v, q, k] = \operatorname{SiLU}\big(W\operatorname{norm}(h)\big), \qquad h' = h + W_O\Big(\operatorname{norm}\Big(\sum_j a_{tj} v_j\Big) \circ u_t\Big) + c \tag{31.5}$$
#
# Both norms are layer norms without weights, with $\varepsilon = 10^{-6}$.

# %%
#| exports
class HSTULayer(nn.Module):
    "One layer of HSTU (31.5) [@zhai2024] in plain PyTorch. Weights of all pairs are in memory: (b, h, t, t)."

    def __init__(
        self,
        d: int,  # width, divisible by `n_heads`
        n_heads: int,
        max_length: int,  # N, and the number of distances with a bias
        dropout: float = 0.0,  # on the gated sum
        time_buckets: int = 0,  # intervals of time with a bias; 0: no times
    ):
        super().__init__()
        check_count("time_buckets", time_buckets, 0)
        self.n_heads, self.max_length = n_heads, max_length
        self.norm1, self.norm2 = (nn.LayerNorm(d, 1e-6, elementwise_affine=False) for _ in range(2))
        self.in_proj, self.out_proj = nn.Linear(d, 4 * d, bias=False), nn.Linear(d, d)
        self.position_bias = nn.Parameter(0.02 * torch.randn(max_length))
        self.time_bias = nn.Parameter(0.02 * torch.randn(time_buckets)) if time_buckets else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Float[Tensor, "b t d"], times: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b t d"]:
        "Equation (31.5)."
        u, a, v = self.attend(h, times)
        return h + self.leave(a @ v, u)

    def attend(self, h: Float[Tensor, "b t d"], times: Int[Tensor, "b t"] | None) -> tuple[Tensor, Tensor, Tensor]:
        "Gate u (b, t, d), relevances a (b, h, t, t) and values v (b, h, t, k)."
        u, v, q, k = nn.functional.silu(self.in_proj(self.norm1(h))).chunk(4, -1)
        v, q, k = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in (v, q, k))
        return u, pointwise_relevance(q @ k.mT + self.bias(h.shape[1], times), self.max_length), v

    def bias(self, t: int, times: Int[Tensor, "b t"] | None) -> Float[Tensor, "*b t t"]:
        "Relative bias by distance, and by time where the layer has one; `ValueError` if it then gets no times."
        position = torch.arange(t, device=self.position_bias.device)
        bias = self.position_bias[(position[:, None] - position).clamp(min=0)]
        if self.time_bias is None:
            return bias
        if times is None:
            raise ValueError("a model with time_buckets needs the times of its items")
        return bias + self.time_bias[time_bucket(times, len(self.time_bias))][:, None]

    def leave(self, heads: Float[Tensor, "b h t k"], u: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        "Norm, gate and output projection of the heads' sums."
        return self.out_proj(self.dropout(self.norm2(heads.transpose(1, 2).flatten(2)) * u))


# %%
torch.manual_seed(0)
hstu_layer = HSTULayer(d=4, n_heads=1, max_length=3)
h = torch.randn(1, 3, 4)
hstu_layer.attend(h, None)[1][0, 0]

# %% [markdown]
# Relevances have both signs and no row sums to one: this is chapter 14's case.
#
# ### The filtering form
#
# **Reliability.** With weights $b_{tj} = a_{tj}\bar\lambda_j$ a factor common to all $\bar\lambda$ would scale the sum. The norm that follows removes this factor, but because of its $\varepsilon$ not quite, and a layer must not change when all keys become surer alike. In kriging the normaliser removes it; here we divide by the mean over the keys a query may see **[D]**:
#
# $$b_{tj} = a_{tj}\, \frac{\bar\lambda_j}{\frac1t \sum_{i \le t}\bar\lambda_i} \tag{31.6}$$
#
# With equal reliabilities, whatever their size, $b = a$ and the sum is HSTU's own.

# %%
import sympy as sp

# %%
from bft_nb.sandwich import claimed_variance, sandwich_variance, signed_kappa, signed_weights
from bft_nb.symbolic import prove

# %%
a1, a2, l1, l2, c = sp.symbols("a1 a2 lambda1 lambda2 c", positive=True)
relative = lambda x, y: (a1 * x + a2 * y) / ((x + y) / 2)
prove(relative(c * l1, c * l2) - relative(l1, l2)), prove(relative(c, c) - (a1 + a2))


# %% [markdown]
# **Variance.** Chapter 14 gives the sandwich variance, the variance that the tracked precision claims, and the posterior of the two (14.5), all per head and value dimension. Written with the functions of that chapter:

# %%
def observe_by_chapter_14(a, lam_bar, v, nu0=1.0):
    "Mean, variance and κ of (31.6): the version to read."
    typical = lam_bar.cumsum(-1) / torch.arange(1, lam_bar.shape[-1] + 1)
    a, lam_bar = a / typical[:, None, :, None], lam_bar[:, None]
    kappa = signed_kappa(signed_weights(a, lam_bar))
    variance = posterior_variance(sandwich_variance(a, lam_bar, v), claimed_variance(a, lam_bar), kappa, nu0)
    return signed_weights(a, lam_bar) @ v, variance, kappa


# %% [markdown]
# This version passes over the table of weights a dozen times. But all it needs from the table are sums, and three matrix products give them all when columns are appended to the values: $b$ times $[v, 1]$, $|b|$ times $[v, 1]$, and $b^2$ times $[v^2, v, 1, 1/\bar\lambda]$. The division by the typical reliability waits until the sums are there.

# %%
#| exports
class SignedMoments(NamedTuple):
    "What three products with the weights b = a λ̄ yield; every entry sums over keys."

    b_v: Float[Tensor, "b h t k"]  # Σ b v
    b: Float[Tensor, "b h t 1"]  # Σ b
    abs_v: Float[Tensor, "b h t k"]  # Σ |b| v
    abs: Float[Tensor, "b h t 1"]  # Σ |b|
    sq_vv: Float[Tensor, "b h t k"]  # Σ b² v²
    sq_v: Float[Tensor, "b h t k"]  # Σ b² v
    sq: Float[Tensor, "b h t 1"]  # Σ b²
    claimed: Float[Tensor, "b h t 1"]  # Σ b²/λ̄


# %%
#| exports
def signed_moments(
    a: Float[Tensor, "b h t t"],  # relevances of any sign, 0 for j > t
    lam_bar: Float[Tensor, "b t"],  # reliability λ̄ of each key, > 0
    v: Float[Tensor, "b h t k"],  # values
) -> SignedMoments:
    "The sums from which chapter 14 makes mean, variance and κ."
    k, lam_bar = v.shape[-1], lam_bar[:, None].unsqueeze(-1)
    one, b = torch.ones_like(v[..., :1]), a * lam_bar.mT
    signed, absolute = b @ torch.cat([v, one], -1), b.abs() @ torch.cat([v, one], -1)
    squared = b.square() @ torch.cat([v.square(), v, one, one / lam_bar], -1)
    return SignedMoments(*signed.split([k, 1], -1), *absolute.split([k, 1], -1), *squared.split([k, k, 1, 1], -1))


# %% [markdown]
# Training may make a query deaf, that is, drive all its weights towards zero: $\mathrm{SiLU}(x) \approx x e^{x}$ for $x \ll 0$, and squares of such weights vanish in float32 long before the weights do. Everything here is homogeneous in $b$ (mean of degree one, variance of degree two, centre and $\kappa$ of degree zero), so each query's weights are measured in units of their largest, and the unit is put back at the end. Without that, gradients are infinite or undefined from weights of about $10^{-12}$ on, and HSTU's filter diverged on Beauty at a learning rate of .006.

# %%
#| exports
LEAST_WEIGHT = 1e-30  # largest |b| of a query that has heard something
SHARPEST = 1e-18  # least variance of a sum, [v²]: the square of its reciprocal, which gradients contain, is a float32


# %%
#| exports
def pointwise_observe(
    a: Float[Tensor, "b h t t"],  # relevances of any sign, 0 for j > t
    lam_bar: Float[Tensor, "b t"],  # reliability λ̄ of each key, > 0, [h⁻²]
    v: Float[Tensor, "b h t k"],  # values, [v]
    nu0: float = 1.0,  # ν₀ > 0, what the prior is worth in observations
) -> Observation:  # float32 or wider; precision 1/`NO_EVIDENCE` and n_eff 0 where no weight is above `LEAST_WEIGHT`
    "The sum of unnormalised attention (31.6) with its sandwich variance (14.2, 14.3, 14.5) [@bft2026]."
    with torch.autocast(v.device.type, enabled=False):
        v, lam_bar = at_least_float32(v), at_least_float32(lam_bar)
        origin = v[..., :1, :].detach()  # residuals do not change; the squares lose less to rounding
        a, typical = at_least_float32(a), (lam_bar.cumsum(-1) / torch.arange(1, lam_bar.shape[-1] + 1, device=v.device))[:, None, :, None]
        largest = (a * lam_bar[:, None, None]).detach().abs().amax(-1, keepdim=True)
        heard = largest > LEAST_WEIGHT
        unit = torch.where(heard, largest, 1)  # in which the sums neither overflow nor vanish; it cancels
        x = signed_moments(a / unit, lam_bar, v - origin)
        whole = torch.where(heard, torch.maximum(x.b.square(), x.sq), 1)
        level = x.abs_v / torch.where(heard, x.abs, 1)
        centre = level + x.b / whole * (x.b_v - x.b * level)  # (14.3)
        sandwich = (x.sq_vv - 2 * centre * x.sq_v + centre.square() * x.sq).clamp_min(0)  # (14.2)
        kappa, unit = torch.where(heard, x.sq / whole, 1), unit / typical
        variance = posterior_variance(sandwich, x.claimed, kappa, nu0) * unit.square()
        variance = torch.where(heard, variance.clamp(SHARPEST, 1 / SHARPEST), NO_EVIDENCE)
        return Observation((x.b_v + x.b * origin) * unit, variance.reciprocal(), (heard / kappa).squeeze(-1))


# %% [markdown]
# The two agree, in value and gradient:

# %%
gen = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
a, lam_bar, v = draw(2, 2, 6, 6).tril().requires_grad_(), draw(2, 6).exp().requires_grad_(), draw(2, 2, 6, 3).requires_grad_()
seen, (mean, variance, kappa) = pointwise_observe(a, lam_bar, v), observe_by_chapter_14(a, lam_bar, v)
torch.testing.assert_close(seen, Observation(mean, 1 / variance, 1 / kappa.squeeze(-1)))

# %%
fast, plain = (torch.autograd.grad(m.sin().sum() + w.log().sum(), (a, lam_bar, v), retain_graph=True) for m, w in ((seen.mean, seen.precision), (mean, 1 / variance)))
torch.testing.assert_close(fast, plain)

# %% [markdown]
# and weights a hundred million times smaller give the same answer in another unit, with finite gradients:

# %%
faint = 1e-8
a32, lam32, v32 = (x.detach().float().requires_grad_() for x in (a, lam_bar, v))
loud, quiet = pointwise_observe(a32, lam32, v32), pointwise_observe(a32 * faint, lam32, v32)
torch.testing.assert_close(quiet.mean / faint, loud.mean)
torch.testing.assert_close(quiet.precision * faint**2, loud.precision)
assert torch.isfinite(torch.autograd.grad(quiet.precision.log().sum(), a32)[0]).all()

# %% [markdown]
# For the three tokens above, with an unreliable second one:

# %%
u, a, v = hstu_layer.attend(h, None)
seen = pointwise_observe(a, torch.tensor([[1.0, 0.1, 1.0]]), v)
seen.n_eff[0, 0].detach(), seen.mean[0, 0, :, 0].detach(), seen.precision[0, 0, :, 0].detach()


# %% [markdown]
# **To the residual stream.** A sum $o$ with variances $V$ passes the norm, the gate and $W_O$. By the delta method, with the diagonal $J$ of the norm's Jacobian (13.4), and (21.2) for the projection **[D]**:
#
# $$1/\lambda_{obs} = (W_O \circ W_O)\big((J \circ u)^2 \circ V\big) \tag{31.7}$$
#
# This variance is kept above $10^{-12}$, as in chapter 21, so that a closed gate gives a large precision rather than an infinite one. A head whose relevances all vanish says zero for certain; if this is so in all heads, nothing was observed.

# %%
#| exports
def gated_precision(
    seen: Observation,  # sums of all heads, in front of the norm
    u: Float[Tensor, "b t d"],  # gate
    weight: Float[Tensor, "d d"],  # W_O
    eps: float,  # of the norm
) -> Float[Tensor, "b t d"]:  # λ_obs, [h⁻²]
    "Precision behind norm, gate and output projection (31.7)."
    with torch.autocast(u.device.type, enabled=False):
        heard = seen.n_eff > 0
        variance = torch.where(heard.unsqueeze(-1), seen.precision.reciprocal(), 0)
        o, variance = (x.transpose(1, 2).flatten(2) for x in (seen.mean, variance))
        through = norm_jacobian(*standardise(o, "layer", eps)) * at_least_float32(u)
        stream = nn.functional.linear(through.square() * variance, at_least_float32(weight).square())
        return torch.where(heard.any(1).unsqueeze(-1), stream.clamp_min(LEAST_VARIANCE), NO_EVIDENCE).reciprocal()


# %% [markdown]
# **Predict.** HSTU has no feed-forward network, hence no dynamics: the state stays where it is, $J = 0$, and the prediction adds process noise alone, $1/\lambda'' = 1/\lambda' + Q$ **[D]**. (Reading the gated branch itself as dynamics would count it twice: it is the observation.)

# %%
#| exports
class BFTHSTULayer(HSTULayer):
    """A filter step with HSTU's attention: `HSTULayer` plus a process noise [@bft2026].

    `kriging=False` and `kalman=False` give `HSTULayer` back. Raises `ValueError` for options out of range."""

    def __init__(
        self,
        d: int,
        n_heads: int,
        max_length: int,
        dropout: float = 0.0,
        time_buckets: int = 0,
        *,
        kriging: bool = True,  # weigh keys by reliability (31.6); False: HSTU's own relevances
        kalman: bool = True,  # gain λ_obs/(λ + λ_obs); False: gain one, the plain residual
        process_noise: float = 0.1,  # Q at the start, per feature, ≥ 0 [h²]; 0: none, and not learned
        nu0: float = 1.0,  # ν₀, degrees of freedom of the prior, > 0
    ):
        super().__init__(d, n_heads, max_length, dropout, time_buckets)
        check_positive("process_noise", process_noise, zero=True)
        check_positive("nu0", nu0)
        check_flag("kriging", kriging)
        check_flag("kalman", kalman)
        self.kriging, self.kalman, self.nu0 = kriging, kalman, nu0
        start = torch.full((d,), process_noise + math.log(-math.expm1(-process_noise)) if process_noise else 0.0)
        self.raw_noise = nn.Parameter(start) if process_noise else None

    @property
    def process_noise(self) -> Tensor:
        "Q, per feature, [h²]."
        return torch.zeros(()) if self.raw_noise is None else nn.functional.softplus(self.raw_noise)

    def forward(self, h: Float[Tensor, "b t d"] | Belief, times: Int[Tensor, "b t"] | None = None) -> Tensor | Belief:
        "One filter step: belief in, belief out; a tensor starts with precision one, and the mean comes out."
        if isinstance(h, Belief):
            return self.step(h, times).predicted
        return self.step(Belief(h, torch.ones_like(h)), times, carry=False).posterior.mean

    def step(self, belief: Belief, times: Int[Tensor, "b t"] | None = None, carry: bool = True) -> Step:
        "One filter step, with everything the layer saw. `carry=False` leaves out the prediction of the precision."
        observation, n_eff = self.observe(belief, times)
        posterior = update(belief, observation)
        if not self.kalman:
            posterior = Belief(belief.mean + observation.mean, posterior.precision)
        still = torch.zeros((), device=belief.mean.device)
        predicted = Belief(posterior.mean, propagate(posterior.precision, still, self.process_noise)) if carry else posterior
        return Step(belief, observation, n_eff, posterior, predicted)

    def observe(self, belief: Belief, times: Int[Tensor, "b t"] | None) -> tuple[Belief, Tensor]:
        "Attention, norm and gate: e and λ_obs in the residual stream, and n_eff per head."
        u, a, v = self.attend(belief.mean, times)
        lam_bar = reliability(belief) if self.kriging else torch.ones_like(belief.precision[..., 0])
        seen = pointwise_observe(a, lam_bar, v, self.nu0)
        lam_obs = gated_precision(seen, u, self.out_proj.weight, self.norm2.eps)
        return Belief(self.leave(seen.mean.to(v.dtype), u), lam_obs), seen.n_eff


# %%
#| exports
class HSTUEncoder(nn.Module):
    "A stack of `HSTULayer`s or `BFTHSTULayer`s with a final norm; tensor in, tensor out; `Belief` in, `Belief` out."

    def __init__(self, layers: list[HSTULayer], d: int):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(d)
        if getattr(layers[-1], "raw_noise", None) is not None:
            layers[-1].raw_noise.requires_grad_(False)  # no observation follows it, as in chapter 22

    def forward(
        self,
        src: Tensor | Belief,  # (b, t, d), left-aligned
        times: Int[Tensor, "b t"] | None = None,
        *,
        precision: Tensor | None = None,  # λ of a tensor `src`, with filtering layers (None: one); the result is a tensor
        with_intermediates: bool = False,  # also return one `Step` per layer; filtering layers only
    ) -> Tensor | Belief | tuple[Belief, list[Step]]:
        "Run or filter a sequence; `TypeError` if plain layers are asked to filter."
        if not isinstance(self.layers[0], BFTHSTULayer):
            if isinstance(src, Belief) or precision is not None or with_intermediates:
                raise TypeError("HSTULayer tracks no precision: give a tensor alone, or use BFTHSTULayer")
            for layer in self.layers:
                src = layer(src, times)
            return self.norm(src)
        belief = src if isinstance(src, Belief) else Belief(src, torch.ones_like(src) if precision is None else precision)
        steps, carry = [], isinstance(src, Belief)
        for layer in self.layers:
            steps.append(layer.step(belief, times, carry or layer is not self.layers[-1]))
            belief = steps[-1].predicted
        belief = normalise(belief, self.norm) if carry else belief._replace(mean=self.norm(belief.mean))
        return (belief, steps) if with_intermediates else belief if carry else belief.mean


# %%
#| exports
class HSTU(Backbone):
    "Hierarchical sequential transduction unit [@zhai2024], plain or filtering: causal, unnormalised attention, learns every next item."

    filter_layer = BFTHSTULayer

    def __init__(
        self,
        n_items: int,  # items are 1..n_items, 0 is padding
        max_length: int = 50,  # longest history the positions cover, and N of (31.4)
        d: int = 64,  # width
        n_layers: int = 2,
        n_heads: int = 2,
        dropout: float = 0.3,  # on the embedding and inside the layers
        time_buckets: int = 0,  # intervals of time with a bias, 128 in the authors' program; 0: order only
        bft: bool = False,  # filtering layers
        precision: str = "item",  # where τ comes from: "item", "mlp" or "constant"; with `bft` only
        precision_init: float = 1.0,  # τ at the start; with `bft` only
        **options,  # further arguments of `BFTHSTULayer`; with `bft` only
    ):
        layer = BFTHSTULayer if bft else HSTULayer
        build = lambda: HSTUEncoder([layer(d, n_heads, max_length, dropout, time_buckets, **options) for _ in range(n_layers)], d)
        super().__init__(build, n_items, max_length, d, n_layers, n_heads, None, dropout, bft, precision, precision_init, options)
        self.time_buckets = time_buckets

    def visible(self, items: Int[Tensor, "b t"], times: Int[Tensor, "b t"] | None) -> dict[str, Any]:
        "Each position looks at itself and back, always; the layers only need to know when."
        return {"times": times}


# %% [markdown]
# Switched off, the filter is HSTU:

# %%
torch.manual_seed(0)
hstu = HSTU(n_items=6, max_length=5, d=8).eval()
hstu_filter = HSTU(n_items=6, max_length=5, d=8, bft=True, kriging=False, kalman=False).eval()
hstu_filter.load_state_dict(hstu.state_dict(), strict=False)
torch.testing.assert_close(hstu_filter(histories), hstu(histories), atol=1e-6, rtol=1e-5)

# %% [markdown]
# Switched on, its gain in the first layer, for Ida:

# %%
HSTU(n_items=6, max_length=5, d=8, bft=True).eval().filter(histories[:1])[1][0].gain.mean(-1).detach()

# %% [markdown]
# ## By name
#
# The backbones, and how many parameters each has with its defaults and 100 items:

# %%
#| exports
BACKBONES: dict[str, type[Backbone]] = {"sasrec": SASRec, "bert4rec": BERT4Rec, "hstu": HSTU}


# %%
{name: sum(p.numel() for p in backbone(n_items=100).parameters()) for name, backbone in BACKBONES.items()}

# %% [markdown]
# ## How it fails
#
# A history longer than the positions cover is refused, because which items to drop is a decision, and a model should not make it in silence. The batches of `bft_nb.training` do make it: they keep the most recent `max_length`.

# %%
test_fail(lambda: model(torch.ones(1, 6, dtype=torch.long)), contains="longer than max_length=5")
test_fail(lambda: bert.last(torch.ones(1, 6, dtype=torch.long)), contains="longer than max_length=5")
test_fail(lambda: model(torch.ones(1, 3)), contains="float32")
test_fail(lambda: SASRec(n_items=6, d=64, n_heads=3), contains="d=64 and n_heads=3")
test_fail(lambda: SASRec(n_items=6, nu0=2.0), contains="nu0")
test_fail(lambda: SASRec(n_items=6, norm_first=1), contains="norm_first must be True or False, got 1")
test_fail(lambda: SASRec(n_items=6, bft=True, precision="user"), contains="'user'")
test_fail(lambda: BERT4Rec(n_items=6, mask_probability=1.5), contains="mask_probability must be in [0, 1], got 1.5")
test_fail(lambda: HSTU(n_items=6, time_buckets=128)(histories), contains="needs the times")

# %% [markdown]
# A history of one item has one neighbour, itself: the sandwich has no residual to look at, and the prior carries the observation.

# %%
one = HSTU(n_items=6, max_length=5, d=8, bft=True).eval().filter(torch.tensor([[4]]))[1][0]
one.n_eff[0, :, 0].detach(), bool(torch.isfinite(one.observation.precision).all())

# %% [markdown]
# ## Assumptions, and where they break
#
# - Time enters SASRec and BERT4Rec only as order: a pause of a minute and one of a year look alike. HSTU reads the times if it is given `time_buckets` and the data have them.
# - The positions are learned, so a model trained on short histories has never seen the later ones.
# - BERT4Rec is trained on blanks anywhere and asked at the end. A state of one of its *items* is not a prediction of the next one; only the mask's is.
# - HSTU keeps the relevances of all pairs in memory, $B H T^2$ numbers, and its filtering form some more: at $T = 200$ and 128 histories of two heads, 41 MB for each such table. A blocked form, like that of chapter 20 for softmax, is possible but has not been written.
# - Plain HSTU is the cheapest of the three, and its filter costs relatively most: about 2.2 times the plain step on a CPU (d = 64, two layers), against 1.3 for SASRec and BERT4Rec, because a signed sum needs three products with the weights where a mean needs one.
# - The variance behind HSTU's norm is the delta method's, and treats features as independent. Where the sum is small beside the norm's $\varepsilon$, as in an untrained layer, the norm is nearly linear and the approximation is good.
#
# ## Summary
#
# - A backbone turns a history into one state per position; the score of an item is the inner product with its embedding. It says itself what a batch teaches: the next item, or the hidden ones.
# - Padding of any amount on either side, and the rest of the batch, change nothing but rounding.
# - The filtering form changes the class of the layers only: kriging and REML for the softmax of SASRec and BERT4Rec, the sandwich for HSTU's signed sums.
#
# ## Exercises
#
# **1.** Without position embeddings, is the last state of a one-layer causal encoder sensitive to the order of the earlier items?
#
# <details><summary>Answer</summary>
#
# No: attention is a weighted sum over a set. Only the position embedding (or a second causal layer, whose earlier states saw different prefixes) tells the orders apart.

# %%
bag = SASRec(n_items=6, max_length=3, d=8, n_layers=1).eval()
bag.position_embedding.weight.data.zero_()
torch.testing.assert_close(bag.last(torch.tensor([[2, 5, 1]])), bag.last(torch.tensor([[5, 2, 1]])))

# %% [markdown]
# </details>
#
# **2.** A neighbour is heard ten times instead of once. What happens to the output of a softmax over ten equal keys, and to HSTU's sum before its norm?
#
# <details><summary>Answer</summary>
#
# The softmax gives each a tenth of the weight, and the mean stays. The sum is ten times as large. Behind the norm the number matters only where there is a second value: ten copies of one value then drown another that is heard once, in proportion ten to one, as a softmax over equal logits would.

# %%
ten, value = torch.ones(1, 10), torch.full((10, 1), 3.0)
(ten.softmax(-1) @ value).item(), (nn.functional.silu(ten) / 50 @ value).item(), (nn.functional.silu(ten[:, :1]) / 50 @ value[:1]).item()

# %% [markdown]
# </details>
#
# **3.** How many blanks does BERT4Rec fill per epoch in a history of $n = 8$ items, on average, and how many next items does SASRec predict?
#
# <details><summary>Answer</summary>
#
# With $\rho = 0.6$ and one sequence in ten that hides the last item alone, $0.1 + 0.9\,(8\rho + (1-\rho)^8)$; SASRec predicts 7.

# %%
bert.n_targets(np.array([8])), model.n_targets(np.array([8]))

# %% [markdown]
# </details>
