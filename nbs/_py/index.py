# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Bayesian Filtering Transformer
#
# > A book that derives the layer, exports it as a library, and tests it on real data.

# %% [markdown]
# A transformer adds what attention finds to what it already holds, and never asks how sure it is of either.
# The Bayesian Filtering Transformer [@bft2026] keeps a *precision* $\lambda$, an inverse variance, beside every hidden value $h$. One layer is then one step of a filter:
# attention observes the context as kriging does, the residual connection becomes a Kalman update with gain $K$, and the feed-forward network predicts, which spends precision.
#
# $$
# K = \frac{\lambda_{\text{obs}}}{\lambda + \lambda_{\text{obs}}}, \qquad h' = h + K \circ e, \qquad \lambda' = \lambda + \lambda_{\text{obs}}
# $$
#
# Here $e$ is what attention reports, $\lambda_{\text{obs}}$ the precision of that report, and $\circ$ the product element by element.
#
# This book proves each of these steps in SymPy, turns each proved formula into the function of the library `bft_nb` that you can import, and asks on real
# interactions whether the layer helps. A result that contradicts the paper is printed as plainly as one that agrees.
#
# ## The smallest case
#
# You hold a value known to a variance of 4 (precision 1/4). The context suggests a change of 2.0 with variance 1 (precision 1). How far should you move?

# %%
precision, observed = 0.25, 1.0
gain = observed / (precision + observed)
gain * 2.0, precision + observed

# %% [markdown]
# You move eight tenths of the way (1.6 of 2.0), and end up surer than before (precision 1.25). The ordinary residual connection always moves all the way, with gain 1, as if nothing were held
# with any certainty.
#
# ## The layer in five lines
#
# `BFTEncoder` takes the place of `torch.nn.TransformerEncoder`, with the same arguments and the same call:
#
# ```python
# import torch
# from bft_nb.encoder import BFTEncoder, BFTEncoderLayer
#
# layer = BFTEncoderLayer(d_model=64, nhead=2, batch_first=True, norm_first=True)
# encoder = BFTEncoder(layer, num_layers=2)
# encoder(torch.randn(8, 50, 64)).shape  # torch.Size([8, 50, 64])
# ```
#
# ## The map
#
# | Part | Chapters | Question |
# |---|---|---|
# | Preliminaries | 00–03 | Which letters, which value, which tools of proof and drawing? |
# | I. The filter | 10–14 | What do kriging, restricted likelihood, the Kalman gain and the delta method say about one token? |
# | II. The layer | 20–22 | How does that become attention, a layer, and a drop-in encoder that is fast enough? |
# | III. Recommendation | 29–33 | Which data, which model, which numbers may be compared, and how sure is a recommendation? |
# | IV. Language | 40–43 | How does a pretrained Llama become a filter without forgetting, how is it taught from noisy answers, and what do gates and attention sinks have to do with it? |
# | V. Experiments | | Does it help, where, and does the learned precision mean anything? |
#
# The results are on one page: [What holds?](experiments/claims.ipynb)
#
# ## How to read
#
# The number of a chapter is its rank: a chapter uses only what lower numbers have built. If you know transformers but not geostatistics, begin with the notation (00) and go straight through Part I.
# If you want to use the layer, read Part II and look up what you need.
# Every chapter has the same shape: a case with numbers, a claim, its proof, the function, a test, a picture, the ways it fails, a summary, exercises with answers that run.
# A blue bar beside a cell means that its code is part of the library.
#
# Wherever it matters, a mark tells apart what the paper says (**[P]**) and what we derived or chose ourselves (**[D]**).
#
# ## How to run
#
# You need Python 3.11 or newer, git and make:
#
# ```bash
# make run      # set up, execute every notebook, leave notebooks and figures in runs/
# make test     # set up, check everything this book promises
# make lab      # open the notebooks
# ```
#
# One experiment with your choice of parameters:
#
# ```bash
# source .venv/bin/activate
# bft run recommendation -p dataset beauty -p bft true
# ```
