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
# **Why** this one: SASRec [@kang2018sasrec] is the transformer reduced to what recommendation needs, and it is the reference that every published comparison starts from.
# The ordinary model and the filtering one differ in the class of their layers and in nothing else, so that a difference in their results has one cause.

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

import torch
from huggingface_hub import PyTorchModelHubMixin
from jaxtyping import Float, Int
from torch import Tensor, nn

from bft_nb.core import Belief, check_count, check_flag, check_option, check_positive
from bft_nb.encoder import BFTEncoder, BFTEncoderLayer, ConstantPrecision, ItemPrecision, MLPPrecision
from bft_nb.layer import Step

# %% [markdown]
# ## The smallest case
#
# A catalogue of six items, and two users. Ida watched items 2, 5 and 1; Bo watched item 4. Items are numbered from 1: 0 is *padding*, the filler that makes rows of different length one tensor.

# %%
histories = torch.tensor([[2, 5, 1], [4, 0, 0]])
(histories != 0).sum(1)


# %% [markdown]
# The filler carries no information, so it must have no influence: not its amount, not its side. Everything in this chapter that looks like bookkeeping serves that one requirement.
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
) -> nn.TransformerEncoder:  # pre-norm, GELU, batch first, final norm
    "The ordinary encoder, from torch's own classes."
    layer = nn.TransformerEncoderLayer(d, n_heads, d_ff, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(d), enable_nested_tensor=False)


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
    **options,  # further arguments of `BFTEncoderLayer`
) -> BFTEncoder:
    "The same stack with filtering layers: only the class differs."
    layer = BFTEncoderLayer(d, n_heads, d_ff, dropout, "gelu", batch_first=True, norm_first=True, **options)
    return BFTEncoder(layer, n_layers, nn.LayerNorm(d), enable_nested_tensor=False)


# %% [markdown]
# What it adds are a process noise per feature and layer (that of the last layer is fixed, since no observation follows it):

# %%
extra = dict(filter_encoder(64, 2, 2, 64, 0.0).named_parameters())
{name: tuple(p.shape) for name, p in extra.items() if "noise" in name}


# %% [markdown]
# A filter needs a precision to start from. It belongs to the item (how much does this item's embedding tell?), is computed from the embedding, or is one number for all [@bft2026]:


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
# ## SASRec
#
# Item embedding plus learned position, dropout, encoder. The score of item $i$ after position $t$ is the inner product with the item's own embedding [@kang2018sasrec]:
#
# $$x_t = \sqrt d\, m_{i_t} + p_t, \qquad r_{ti} = h_t^\top m_i \tag{31.2}$$
#
# The same $m$ serves at both ends with two jobs: large enough to be heard beside the position at the input, small enough for scores near zero at the start. The factor $\sqrt d$ at the input, which the authors' program has too, reconciles them; without it, validation NDCG@10 on Beauty after six epochs is .016 instead of .025 (learning rate 0.001, dropout .5, one seed).
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
    options: dict[str, object],  # of the filtering layers
    bft: bool,  # are there any?
) -> None:
    "Raise `TypeError` for options a plain model can't have, or that `BFTEncoderLayer` does not know."
    if options and not bft:
        raise TypeError(f"{', '.join(options)}: options of the filtering layers need bft=True")
    allowed = [p.name for p in inspect.signature(BFTEncoderLayer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in options if name not in allowed]:
        raise TypeError(f"unknown option {unknown[0]!r} (allowed: {', '.join(allowed)})")


# %%
#| exports
class SASRec(nn.Module, PyTorchModelHubMixin):
    "Self-attentive sequential recommendation [@kang2018sasrec], plain or filtering."

    def __init__(
        self,
        n_items: int,  # items are 1..n_items, 0 is padding
        max_length: int = 50,  # longest history the positions cover
        d: int = 64,  # width
        n_layers: int = 2,
        n_heads: int = 2,
        d_ff: int | None = None,  # width of the feed-forward network; None: as wide as `d`
        dropout: float = 0.3,  # on the embedding and inside the layers
        bft: bool = False,  # filtering layers in place of torch's
        precision: str = "item",  # where τ comes from: "item", "mlp" or "constant"; with `bft` only
        precision_init: float = 1.0,  # τ at the start; with `bft` only
        **options,  # further arguments of `BFTEncoderLayer`; with `bft` only
    ):
        super().__init__()
        check_sizes(n_items, max_length, d, n_layers, n_heads, d_ff, dropout)
        check_flag("bft", bft)
        check_option("precision", precision, ("item", "mlp", "constant"))
        check_positive("precision_init", precision_init)
        check_filter_options(options, bft)
        self.n_items, self.max_length, self.bft = n_items, max_length, bft
        self.item_embedding = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.position_embedding = nn.Embedding(max_length, d)
        self.dropout = nn.Dropout(dropout)
        build = filter_encoder if bft else plain_encoder
        self.encoder = build(d, n_layers, n_heads, d if d_ff is None else d_ff, dropout, **options)
        self.precision = initial_precision(precision, n_items, d, precision_init) if bft else None
        self.reset_embeddings()

    def reset_embeddings(self) -> None:
        "Draw embeddings and positions from N(0, 0.02²), padding zero."
        for embedding in (self.item_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        with torch.no_grad():
            self.item_embedding.weight[0] = 0

    def item_weights(self) -> Float[Tensor, "v d"]:
        "The output embedding $m$, row 0 is padding."
        return self.item_embedding.weight

    def check_ids(self, items: Int[Tensor, "..."]) -> None:
        "Raise `TypeError` or `ValueError` for ids this model does not know."
        if not isinstance(items, Tensor) or items.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"items must be a tensor of int64 or int32, got {items.dtype if isinstance(items, Tensor) else type(items).__name__}")
        wrong = (items < 0) | (items > self.n_items)
        if bool(wrong.any()):
            raise ValueError(f"items must be ids 0 (padding) or 1..{self.n_items}, got {int(items[wrong][0])}")

    def check_items(self, items: Int[Tensor, "b t"]) -> None:
        "Raise `TypeError` or `ValueError` for ids or lengths this model does not know."
        self.check_ids(items)
        if items.ndim != 2:
            raise ValueError(f"items must have shape (batch, time), got {tuple(items.shape)}")
        if items.shape[1] > self.max_length:
            raise ValueError(f"a history of {items.shape[1]} items is longer than max_length={self.max_length}: keep the most recent ones")

    def embed(self, items: Int[Tensor, "b t"]) -> Tensor | Belief:
        "Input $x$ of the encoder (31.2), after dropout; with its initial precision if the encoder filters."
        embedding = self.item_embedding(items) * self.item_embedding.embedding_dim**0.5
        positions = torch.arange(items.shape[1], device=items.device)
        x = self.dropout(embedding + self.position_embedding(positions))
        return x if self.precision is None else Belief(x, self.precision(items, embedding))

    def encode(self, items: Int[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        "States of left-aligned histories, before padding is blanked."
        x = self.embed(items)
        if isinstance(x, Belief):
            return self.encoder(x.mean, is_causal=True, precision=x.precision)
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1], device=x.device, dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=True)

    def filter(
        self,
        items: Int[Tensor, "b t"],  # left-aligned, 0 is padding
    ) -> tuple[Belief, list[Step]]:  # final belief; per layer: prior, observation, n_eff, posterior, predicted
        "What a filtering model believes at each position and how it got there; `TypeError` for a plain model."
        self.check_items(items)
        x = self.embed(items)
        if not isinstance(x, Belief):
            raise TypeError("a plain SASRec tracks no precision: make it with bft=True")
        return self.encoder(x, is_causal=True, with_intermediates=True)

    def forward(
        self,
        items: Int[Tensor, "b t"],  # histories, 0 is padding on either side
    ) -> Float[Tensor, "b t d"]:  # $h_t$; zero where items are padding
        "State after each item of each history; `ValueError` if longer than `max_length`, `TypeError` for non-integers."
        self.check_items(items)
        pad = (items == 0).unsqueeze(-1)
        if not bool((pad[:, :-1] & ~pad[:, 1:]).any()):
            return self.encode(items).masked_fill(pad, 0)
        aligned, order = align_left(items)
        hidden = self.encode(aligned)
        back = order.argsort(dim=1).unsqueeze(-1).expand_as(hidden)
        return hidden.gather(1, back).masked_fill(pad, 0)

    def last(self, items: Int[Tensor, "b t"]) -> Float[Tensor, "b d"]:
        "State after the most recent item; zero for an empty history. `ValueError` unless there is a position to look at."
        if items.ndim != 2 or not items.shape[1]:
            raise ValueError(f"items must have shape (batch, time) with one position at least, got {tuple(items.shape)}")
        position = torch.arange(items.shape[1], device=items.device)
        index = torch.where(items != 0, position, 0).amax(1)
        return self(items)[torch.arange(len(items), device=items.device), index]

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
# The side and the amount of padding, and the company in the batch:

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
# Replace one item of a history and see which states move. With twelve positions:

# %%
from fastcore.test import test_fail
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
# The parameters that set a precision, which training gives a learning rate of their own:

# %%
tracked = SASRec(n_items=6, max_length=5, d=8, bft=True).eval()
[tuple(p.shape) for p in precision_parameters(tracked)]

# %% [markdown]
# One number per item and a noise per feature and layer. And the gain of the first layer, position by position, for Ida: a first item has only itself to observe, later ones have more evidence:

# %%
belief, steps = tracked.filter(histories[:1])
steps[0].gain.mean(-1).detach()

# %% [markdown]
# ## How it fails
#
# A history longer than the positions cover is refused, because silently dropping items is a decision: the batches of `bft_nb.training` make it and keep the most recent `max_length`.

# %%
test_fail(lambda: model(torch.ones(1, 6, dtype=torch.long)), contains="longer than max_length=5")
test_fail(lambda: model(torch.ones(1, 3)), contains="float32")
test_fail(lambda: SASRec(n_items=6, d=64, n_heads=3), contains="d=64 and n_heads=3")
test_fail(lambda: SASRec(n_items=6, nu0=2.0), contains="nu0")
test_fail(lambda: SASRec(n_items=6, bft=True, precision="user"), contains="'user'")

# %% [markdown]
# ## Assumptions, and where they break
#
# Time enters only as order: a pause of a minute and one of a year look alike. The positions are learned, so a model trained on short histories has never seen the later ones. Both are what the reference does; HSTU, later, changes the first.
#
# ## Summary
#
# - SASRec turns a history into one state per position; the score of an item is the inner product with its embedding.
# - Padding of any amount on either side, and the rest of the batch, change nothing but rounding.
# - The encoder is torch's own; the filtering form changes the class of the layers only.
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
