# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a gate follow the context, and does the gain?
#
# > Sinks, effective sample size, gates and gains against the length of the context: in a pretrained model, after fine-tuning, and in small models trained from nothing.

# %% [markdown]
# **The paper says** why its filter helps where gates help, and more: a learned sigmoid gate [@qiu2025gated] does not change with the length of the context, the Kalman gain does, because the effective sample size does [@bft2026].
#
# **What would refute it here**: a gate whose log-odds rise with the length as those of the gain do, or a gain that is as flat as the gate. [Chapter 43](../43_sinks.ipynb) adds a doubt to be settled: a head that is a sink (it keeps much of its weight on the first token) hides the length from the effective sample size $n$, and its gain may stand still or fall.
#
# The common unit: $g = 2\sigma(\cdot)$ and $K = \sigma(\cdot)$ are sigmoids, so we regress the log-odds, base 2, on the logarithm of the position, base 2. A slope of 0 is flat. At a slope of 1 the odds double when the context does, as they do for a broad head with $\lambda_{\text{obs}} \propto n$ and for a sink logit (43.6).
#
# This page runs *one* cell of the study, by default a tiny Llama on made-up sentences, offline and in seconds.

# %% tags=["parameters"]
study = "scratch"  # "pretrained": as it is; "tuned": after some steps on running text, all weights; "scratch": from random weights
model = "tiny"  # pretrained, tuned: "smollm2", an id of the hub, a folder; scratch: "small" (5.6 million parameters); "tiny" fits all
method = "bft"  # "sft" (plain), "headwise", "elementwise", "sink" (learnt logits) or "bft"
start = "letter"  # of the filter: "letter" (both β at 1, the paper's), "no gain" (K stays 1), "shipped" (chapter 40's, leaves a pretrained model what it is); of the plain model: "damped" (a constant gain)
text = "lookup"  # or "qa": contexts of four sets to learn from, of squad_v1.1_dev to be measured on
length = 128  # tokens of a text, BOS included; one pass measures all lengths up to it
windows = 4  # texts that are measured
steps = 20  # none where the study is "pretrained"
lr = 3e-3  # at its highest
precision_lr = 0.0  # of what only a filter or a gate has; 0: `lr`
seed = 0
heads = []  # (layer, head), counted from 0, whose maps are kept; none: the one with the most mass on the first token, and the one with the largest n
device = "auto"  # or "cpu", "cuda", "mps"
dtype = "float32"  # or "bfloat16": autocast
store = False  # append the rows to data/results of this checkout?

# %%
import math
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from bft_nb.core import check_option
from bft_nb.corpus import HELD_OUT, TAUGHT, as_examples, blocks, documents, spread, token_stream
from bft_nb.figures import COLOUR, use_style
from bft_nb.finetune import METHODS, added_parameters, answering, converted, finetune
from bft_nb.llama import calibrate
from bft_nb.models import TINY, load_model, tiny_llama, tiny_tokenizer, title
from bft_nb.qa import Collator, mean_nll
from bft_nb.qa_study import ROLES
from bft_nb.ranking import bootstrap_mean
from bft_nb.report import choose, configuration, results_folder
from bft_nb.results import append_rows, check_new, load_arrays, model_name, ranks_path, run_key, run_rows, save_arrays
from bft_nb.runner import checkout
from bft_nb.sink_study import ARMS, BUDGETS, method_of, peak_memory, sink_rows, titled
from bft_nb.sinks import attention_maps, measure_sinks, per_head, sink_kappa, sink_rate
from bft_nb.training import resolve_device

# %%
use_style()
SHAPES = {"tiny": dict(d=64, n_layers=2), "small": dict(d=256, n_layers=8)}  # of a model from scratch: 4 heads, 2 of keys
VOCABULARY = {"tiny": 512, "small": 4096}
DAMPING = 0.3  # of a damped plain model: a factor on what attention writes into the residual, a gain that knows nothing
batch_size = 2
STARTS = {"letter": dict(beta_a=1.0, beta_g=1.0), "no gain": dict(beta_a=1.0, beta_g=0.0), "shipped": {}}
for name, value, allowed in (("study", study, ("pretrained", "tuned", "scratch")), ("method", method, ARMS), ("start", start, (*STARTS, "damped")), ("text", text, ("lookup", "qa"))):
    check_option(name, value, allowed)
if study == "scratch":
    check_option("model", model, SHAPES)
damped = start == "damped"
if damped and method != "sft":
    raise ValueError(f"start 'damped' is of the plain model, method 'sft', got method {method!r}")
if store and (model == TINY or text == "lookup"):
    raise ValueError("rows of the tiny model and of made-up sentences are not stored: choose model and text, or store=false")
place, called = resolve_device(device), model_name(model)

# %% [markdown]
# ## Text
#
# Paragraphs that questions are asked about, each once, in the order of their files: Wikipedia (44 articles of SQuAD's training part, SQuADShifts' new ones), Amazon reviews, and passages of Natural Questions with their titles. What is measured on is SQuAD's development part, which has other articles. A blank line between paragraphs; each text of `length` tokens begins with BOS, which occurs nowhere else.

# %%
taught = documents(TAUGHT if text == "qa" else ["lookup"])
asked = documents(HELD_OUT, besides=taught) if text == "qa" else taught[-len(taught) // 4 :]
taught = taught if text == "qa" else taught[: -len(taught) // 4]
if study == "scratch":
    tokenizer = tiny_tokenizer(taught, VOCABULARY[model], length)
    lm = tiny_llama(tokenizer, **SHAPES[model], max_length=length, seed=seed)
else:
    lm, tokenizer = load_model(model)
if tokenizer.bos_token_id is None:
    raise ValueError(f"{model!r} has no BOS token, with which every text of this study begins")
streams = {"to learn from": token_stream(taught, tokenizer), "to be measured on": token_stream(asked, tokenizer)}
cut = {part: blocks(tokens, length, tokenizer.bos_token_id) for part, tokens in streams.items()}
pd.DataFrame({part: {"paragraphs": len(texts), "tokens": len(tokens), "different tokens": len(tokens.unique()), "texts": len(cut[part])} for (part, tokens), texts in zip(streams.items(), (taught, asked))}).T

# %% [markdown]
# ## One cell
#
# A filter's scales are calibrated on eight of the texts that are learnt from. A model from scratch has nothing to lose, so its filter starts with the equations to the letter. Two more arms take it apart: a filter without a gain, and a plain model with a constant one (*damped*), the null. A training whose rows are stored keeps checkpoints and, if it is killed, goes on from the last of them; with `store = False` it writes none.

# %%
params = dict(study=study, method=method, length=length, windows=windows, dtype=dtype)
if method == "bft":
    params["start"] = start
if damped:
    params["damping"] = DAMPING
if study != "pretrained":
    params |= dict(steps=steps, batch_size=batch_size, lr=lr)
    if METHODS[method].added:
        params["precision_lr"] = precision_lr or lr
run = dict(exp="attention_sinks", dataset=text, model=called, params=params, seed=seed)
if store: check_new(results_folder() / "attention_sinks.csv", run)
configuration(params)

# %%
filtering = dict(STARTS[start], attn_implementation="bft_blocked") if method == "bft" else {}
torch.manual_seed(seed)
lm = converted(lm, method, **filtering).to(place)
if filtering:
    calibrate(lm, {"input_ids": spread(cut["to learn from"], 8)[:, :512].to(place)})
if damped:
    for layer in lm.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda linear, args, out: DAMPING * out)
pd.Series({"model": title(model) if study != "scratch" else f"{model} Llama", "parameters": f"{lm.num_parameters():,}", "of a filter or gates": f"{added_parameters(lm, method):,}", "method": METHODS[method].title}).to_frame("")

# %%
begin = time.perf_counter()
collate, losses = Collator(tokenizer), []
if study != "pretrained":
    folder = checkout() / "runs" / "finetune" / run_key(run) if store else None
    training = dict(steps=steps, lr=lr, precision_lr=params.get("precision_lr"), batch_size=batch_size, seed=seed, dtype=dtype, device=device)
    losses = finetune(lm, as_examples(cut["to learn from"]), collate, method, **training, out_dir=folder, progress=store).losses
lm.eval()
pd.DataFrame(losses[:: max(1, len(losses) // 8)], columns=["step", "loss"]).set_index("step").round(2).T


# %% [markdown]
# The measures are chapter 43's, on texts spread over the held-out stream. BOS is in front of every text; a pretrained plain model is measured both with it and without. The length, too, is varied in two ways. In one pass the length of the context is the position of a query, but late queries are other text than early ones; so the *same* last tokens of each text are read again behind contexts of growing length.

# %%
last = min(64, length // 4)  # tokens that are read behind contexts of growing length
behind = [2 * last * 2**i for i in range(int(math.log2(length / (2 * last))) + 1)]  # lengths with the context


def measure_each(rows: torch.Tensor, bins: list[tuple[int, int]] | None = None) -> pd.DataFrame:
    "The measures of each text."
    frame = pd.concat([measure_sinks(lm, row[None], bins).assign(text=i) for i, row in enumerate(rows.to(place))], ignore_index=True)
    return frame.drop(columns=["gain", "gain_odds"]) if params.get("start") == "no gain" else frame  # 1, and infinite


def measure(rows: torch.Tensor) -> tuple[pd.DataFrame, pd.DataFrame, float]:
    "The measures of each text; those of its last tokens, the first token kept in front; and the loss per token."
    with answering(lm, dtype):
        same = pd.concat([measure_each(torch.cat([rows[:, :1], rows[:, 1 - n :]], 1), [(n - last + 1, n)]) for n in behind])
        return measure_each(rows), same, mean_nll(lm, as_examples(rows), collate, batch_size=1)


# %%
texts = {"bos": spread(cut["to be measured on"], windows)}
if study == "pretrained" and method == "sft":
    texts["no bos"] = spread(blocks(streams["to be measured on"], length), windows)
measured = {split: measure(rows) for split, rows in texts.items()}
memory = {} if place.type != "cpu" or math.isnan(peak := peak_memory()) else {"peak_memory": peak}  # GB
{split: {"bos": bool(frame["bos"].all()), "loss": round(loss, 3), "sink rate": round(sink_rate(frame), 3)} for split, (frame, _, loss) in measured.items()}

# %% [markdown]
# Measures by length are means over texts, layers and heads. The slope of each is taken from the queries 33–64 on: a line through the bins of one text against the logarithm of their ends, averaged over texts with a bootstrap interval. $n$ enters by its logarithm, odds in doublings.

# %%
BY_LENGTH = ("mass", "learnt", "n_eff", "n_rest", "gate", "gate_odds", "gain", "gain_odds")
LOGARITHMS = ("n_eff", "n_rest")


def in_doublings(frame: pd.DataFrame) -> pd.DataFrame:
    "The measures that a frame has, log-odds and sample sizes with base 2."
    known = [name for name in BY_LENGTH if name in frame]
    odds = {name: frame[name] / math.log(2) for name in known if name.endswith("_odds")}
    return frame[["text", "layer", "head", "high", *known]].assign(**odds, **{name: np.log2(frame[name]) for name in LOGARITHMS})


# %%
def slopes(frame: pd.DataFrame) -> dict[str, float]:
    "Change per doubling of the length: mean over texts and its interval."
    lines = in_doublings(frame).query("high >= 64").groupby(["text", "high"]).mean()
    found = {}
    for name in (n for n in BY_LENGTH if n in lines):
        of_text = lines[name].unstack("text")
        values = np.polyfit(np.log2(of_text.index), of_text.to_numpy(), 1)[0]
        mean, low, high, _ = bootstrap_mean(values)
        found |= {f"slope.{name}": mean, f"slope.{name}.low": low, f"slope.{name}.high": high}
    return found


# %%
def metrics(frame: pd.DataFrame, same: pd.DataFrame, loss: float) -> dict[str, float]:
    "What becomes a row: names with a number are of a bin, the one that ends at that position; `same.` says of the same tokens."
    means = frame.groupby("high")[[name for name in BY_LENGTH if name in frame]].mean()
    by_length = {f"{name}.{high:05d}": value for name, column in means.items() for high, value in column.items()}
    rates = {f"sink_rate.{high:05d}": sink_rate(part) for high, part in frame.groupby("high")}
    of_same = {f"same.{name}": value for name, value in (slopes(same) if len(behind) > 1 else {}).items()}
    return {"loss": loss, "sink_rate": sink_rate(frame)} | by_length | rates | slopes(frame) | of_same


# %%
results = {split: metrics(*found) for split, found in measured.items()}
pd.DataFrame({split: {name: value for name, value in found.items() if "slope." in name} for split, found in results.items()}).round(3)

# %% [markdown]
# Single heads are kept as arrays (layer, head, bin), and two maps of the first 64 tokens of the first text: of the head with the most mass on the first token, and of the one with the largest $n$ (both counted from 0).


# %%
def arrays(frame: pd.DataFrame, rows: torch.Tensor) -> dict[str, np.ndarray]:
    "Means over texts, the bins, and the maps of two heads."
    columns = frame.drop(columns=["text", "low", "length", "bos"]).groupby(["layer", "head", "high"]).mean()
    shape = [columns.index.get_level_values(i).nunique() for i in range(3)]
    found = {name: column.to_numpy(np.float32).reshape(shape) for name, column in columns.items()}
    means = per_head(frame)
    chosen = [tuple(head) for head in heads] or [means["mass"].idxmax(), means["n_eff"].idxmax()]
    maps = attention_maps(lm, rows[:1, :64].to(place), chosen).cpu().numpy().astype(np.float16)
    return found | {"high": columns.index.unique("high").to_numpy(), "map_heads": np.array(chosen), "maps": maps}


# %%
def keep(folder: Path) -> None:
    "Rows and arrays of this run in a folder."
    for split, (frame, _, _) in measured.items():
        save_arrays(ranks_path(folder / "sinks", run, split.replace(" ", "-")), arrays(frame, texts[split]))
    found = {split: {name: (value, windows) for name, value in (of | memory).items()} for split, of in results.items()}
    append_rows(folder / "attention_sinks.csv", run_rows(run, found, seconds=round(time.perf_counter() - begin, 1), device=place.type))


if store:
    keep(results_folder())

# %% [markdown] tags=["result"]
# ## The study
#
# What follows is read from the stored rows, whatever run this page was made by; where there are none, the figures show this run.
#
# ```bash
# bft models fetch smollm2
# BFT_DATA=… bft sweep nbs/experiments/grids/attention_sinks.yaml
# ```

# %%
source, budgets = results_folder(), BUDGETS
if not (source / "attention_sinks.csv").exists():
    source, budgets = Path((here := tempfile.TemporaryDirectory()).name), {study: {}}
    keep(source)
stored = sink_rows(source, budgets)
STYLES = dict(sft=":", headwise="-.", elementwise="--", sink=(0, (5, 1, 1, 1, 1, 1)), bft="-")


# %%
def cells(study: str, split: str = "bos") -> dict[tuple[str, int], pd.Series]:
    "The metrics of every stored run of a study: (arm, seed) -> values by name."
    rows = choose(stored, study=study, split=split)
    rows = rows.assign(order=rows["method"].map(list(ARMS).index))
    return {(arm, seed): part.set_index("metric")["value"] for (_, arm, seed), part in rows.groupby(["order", "arm", "seed"])}


def curve(values: pd.Series, name: str) -> pd.Series:
    "A measure by the end of its bin."
    found = values[values.index.str.fullmatch(rf"{name}\.\d+")]
    return found.set_axis(found.index.str[len(name) + 1 :].astype(int))


# %%
def signed(values: pd.Series, name: str, of: str = "") -> str:
    "A slope with its interval, empty where there is none."
    if f"{of}slope.{name}" not in values:
        return ""
    mean, low, high = (f"{values[f'{of}slope.{name}{end}']:+.2f}".replace("-", "−") for end in ("", ".low", ".high"))
    return f"{mean} [{low}, {high}]"


def table(study: str, split: str = "bos") -> pd.DataFrame:
    "One line per arm and seed."
    lines = {}
    for key, values in cells(study, split).items():
        inside = "gate_odds" if "slope.gate_odds" in values else "gain_odds"
        mass = curve(values, "mass")
        lines[key] = {"loss": f"{values['loss']:.3f}", "sink rate": f"{values['sink_rate']:.2f}", "mass at end": f"{mass.iloc[-1]:.2f}", "n at end": f"{curve(values, 'n_eff').iloc[-1]:.1f}"}
        lines[key] |= {"log₂ n": signed(values, "n_eff"), "log₂ odds": signed(values, inside), "same tokens": signed(values, inside, "same.")}
    return pd.DataFrame(lines or {"no rows yet": {}}).T


# %% [markdown]
# ### Sinks of a pretrained model
#
# With BOS in front, and without; slopes are per doubling of the length, with 95 % bootstrap intervals over texts: of $\log_2 n$, of the $\log_2$ odds of gate or gain, and of these for the same 64 tokens behind contexts of growing length. The filter is at the start that chapter 40 ships, calibrated, not trained.

# %%
pd.concat({split: table("pretrained", split) for split in ("bos", "no bos")})

# %% [markdown]
# Three figures follow: two heads, means over heads by position, and layers. First the most memory that these runs have held at once [GB], libraries, weights and all; a table of all pairs in float32 would take 4.5 GB more in the plain model, of 30 layers, 9 heads and 2,048 tokens:

# %%
most = choose(stored, study="pretrained", split="bos", metric="peak_memory")
most.groupby("arm")["value"].max().round(2).to_frame("GB") if len(most) else "not stored"


# %%
def arrays_of(rows: pd.DataFrame, split: str = "bos") -> dict[str, np.ndarray]:
    "The arrays of the first of some stored runs."
    run = rows.iloc[0][["exp", "dataset", "model", "params", "seed"]].to_dict()
    return load_arrays(ranks_path(source / "sinks", run, split)) | {"title": f"{title(run['model'])}, {rows.iloc[0]['arm']}"}


def heads_of(study: str, method: str, split: str = "bos") -> dict[str, np.ndarray]:
    "The arrays of an arm, or of any run there is."
    rows = choose(stored, split=split)
    return arrays_of(next(part for part in (choose(rows, study=study, method=method), choose(rows, study=study), rows) if len(part)))


# %%
#| label: fig-maps
#| fig-cap: "A head that is a sink and one that is broad: weights of the first 64 tokens of a text with BOS in front; the root of each weight as darkness, black is 1."
#| code-fold: true
shown = heads_of("pretrained", "sft")
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3))
for ax, (layer, head), weights in zip(axes, shown["map_heads"], shown["maps"]):
    ax.imshow(weights.astype(float) ** 0.5, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
    ax.set(title=f"layer {layer}, head {head}", xlabel="key", ylabel="query" if ax is axes[0] else None, xticks=(0, 63), yticks=(0, 63))
    ax.tick_params(labelsize=8)
fig.suptitle(shown["title"], fontsize=9)
plt.show()

# %%
#| label: fig-position
#| fig-cap: "Left: mass on the first token, mean over heads and texts (solid), and the share of heads that are sinks (dashed), against the position of the query. Right: effective sample size, with the first token (solid) and of the other keys (dashed)."
#| code-fold: true
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8))
for split, colour in (("bos", COLOUR["posterior"]), ("no bos", COLOUR["baseline"])):
    for (arm, _), values in (cells("pretrained", split) or cells(study, split)).items():
        if arm == "plain" or not cells("pretrained"):
            mass, rate, n, rest = (curve(values, name) for name in ("mass", "sink_rate", "n_eff", "n_rest"))
            left.plot(mass.index, mass, "o-", color=colour, markersize=3, label="BOS in front" if split == "bos" else "no BOS")
            left.plot(rate.index, rate, "o--", color=colour, markersize=3)
            right.plot(n.index, n, "o-", color=colour, markersize=3)
            right.plot(rest.index, rest, "o--", color=colour, markersize=3)
left.set(xscale="log", ylim=(0, 1), xlabel="position of the query", ylabel="mass on the first token, sink rate")
right.set(xscale="log", yscale="log", xlabel="position of the query", ylabel="effective sample size [keys]")
left.legend(fontsize=8)
plt.show()

# %%
#| label: fig-layers-lengths
#| fig-cap: "Mass on the first token by layer and position of the query, mean over heads, BOS in front; and λ̄ of the filter, its logarithm."
#| code-fold: true
plain, filtered = heads_of("pretrained", "sft"), heads_of("pretrained", "bft")
fig, axes = plt.subplots(1, 2, figsize=(7, 2.6))
shades = [plain["mass"].mean(1)] + ([np.log10(filtered["lam_bar"]).mean(1)] if "lam_bar" in filtered else [])
for ax, shade, name, top in zip(axes, shades, ("mass", "log₁₀ λ̄ [h⁻²]"), (1, None)):
    drawn = ax.imshow(shade, aspect="auto", origin="lower", cmap="cividis", vmin=None if top is None else 0, vmax=top)
    ax.set(xlabel="position of the query, up to", ylabel="layer", xticks=range(0, len(plain["high"]), 2), xticklabels=plain["high"][::2])
    ax.tick_params(labelsize=8)
    fig.colorbar(drawn, ax=ax, label=name)
plt.show()

# %% [markdown]
# Do real heads follow the formulas of chapter 43? In the four panels of the figure each dot is a head, at the bin that ends at 1,024 (or the last).
#
# - *Sample size*: by (43.1) no dot may lie above $1/m^2$; the curve below it is that of an even spread over all other keys.
# - *Scatter*: by (43.2) it lies between the two curves, whatever the others say, if the sink's value is zero.
# - *$4 s_0^2$*: (43.4) tells on which side a filtering head lies; below 1, its gain would rise on the last stretch to $m = 1$. The curve is that of a head calibrated at its own constant mass, with $\mu = 0$.
# - *Precision*: the curve is again that of such a head, of $\lambda_{\text{obs}}$ by (43.3), with the median $N$ of these heads.

# %%
#| label: fig-heads
#| fig-cap: "Measured heads (dots) and chapter 43's formulas (lines), by the mass on the first token, BOS in front: effective sample size 1/κ; scatter as a share of the others' mean square; 4 s₀² as a share of it, and the precision of the observation in its unit, in the filtering model (dots beyond the axes are left out)."
#| code-fold: true
at = int(np.abs(plain["high"] - 1024).argmin())
m = torch.linspace(0.01, 0.995, 200)
fig, axes = plt.subplots(2, 2, figsize=(6.4, 4.4), sharex=True, dpi=90)
(size, spread), (claims, precision) = axes
dots = dict(s=4, color=COLOUR["posterior"], linewidths=0)
lines = dict(color=COLOUR["truth"], linewidth=1)
of = {name: plain[name][..., at].ravel() for name in ("mass", "kappa", "scatter", "others")}
size.scatter(of["mass"], 1 / of["kappa"], **dots)
size.plot(m, 1 / m**2, **lines)
size.plot(m, 1 / sink_kappa(m, torch.tensor(float(plain["high"][at]))), **lines)
size.set(yscale="log", ylabel="n = 1/κ [keys]", ylim=(0.8, 1000))
spread.scatter(of["mass"], of["scatter"] / of["others"], **dots)
spread.plot(m, 1 - m, **lines)
spread.plot(m, m * (1 - m), **lines)
spread.set(ylabel="S / mean square", ylim=(0, 1.1))
if "claim" in filtered:
    of = {name: filtered[name][..., at].ravel() for name in ("mass", "claim", "others", "variance", "n_rest")}
    claims.scatter(of["mass"], 4 * of["claim"] / of["others"], **dots)
    claims.plot(m, 4 * (1 - m), **lines)
    claims.axhline(1, color=COLOUR["prior"], linewidth=0.8)
    precision.scatter(of["mass"], of["others"] / of["variance"], **dots)
    kappa = sink_kappa(m, torch.tensor(float(np.median(of["n_rest"]))))
    precision.plot(m, 1 / (kappa * (1 - m) * (1 + kappa)), **lines)
claims.set(yscale="log", ylabel="4 s₀² / mean square", ylim=(0.02, 20))
precision.set(yscale="log", ylabel="λ_obs · mean square", ylim=(1, 3000))
for ax in axes[1]:
    ax.set_xlabel("mass on the first token")
plt.show()

# %% [markdown]
# Is a sink a gate that follows the length, as (43.6) says of a sink whose logit stands still? The table has, of the heads that are sinks at the length of the figure, their mean mass; the mass by (43.6) if each weighs as many keys at every length as it does there; and the weight $c = mT/(1-m)$ in keys that (43.6) needs at each length (median over heads). Beside them the mean mass of the other heads.

# %%
high, closed = plain["high"], plain["mass"][..., at] > 0.3
mass, keys = plain["mass"][closed], np.minimum(0.75 * high, high - 1)  # the middle of a bin
weight = mass * keys / (1 - mass)
modelled = (weight[:, [at]] / (weight[:, [at]] + keys)).mean(0)
columns = {f"mass of {closed.sum()} sinks": mass.mean(0).round(2), "by (43.6)": modelled.round(2), "c [keys], median": np.median(weight, 0).round(), f"mass of {(~closed).sum()} others": plain["mass"][~closed].mean(0).round(2)}
pd.DataFrame(columns, index=pd.Index(high, name="queries up to")) if closed.any() else "no sinks"


# %% [markdown]
# The same in slopes per doubling of the length: of the $\log_2$ odds of $1 - m$, which (43.6) puts at 1, and of $\log_2 n$, both of the plain model; of $\log_2 \lambda_{\text{obs}}$ of each head in the filter. The last row says how near the first token's value is to zero: its mean square as a share of the others'.


# %%
def spread_of(values: np.ndarray) -> str:
    "Median and the middle 80 %."
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*np.percentile(values, (50, 10, 90))).replace("-", "−") if len(values) else ""


def head_slopes(found: np.ndarray, high: np.ndarray) -> np.ndarray:
    "Change per doubling of the length, from the queries 33–64 on: (layer, head, bin) -> (layer, head)."
    late = high >= 64
    return np.polyfit(np.log2(high[late]), found[..., late].reshape(-1, late.sum()).T, 1)[0].reshape(found.shape[:2])


# %%
odds = head_slopes(np.log2((1 - plain["mass"]) / plain["mass"]), high)
columns = {"log₂ odds of 1 − m": odds, "log₂ n": head_slopes(-np.log2(plain["kappa"]), high)}
if "variance" in filtered:
    columns["log₂ λ_obs"] = head_slopes(-np.log2(filtered["variance"]), filtered["high"])
columns["value of the first token"] = (plain["first"] / plain["others"])[..., at]
pd.DataFrame({name: {"sinks": spread_of(x[closed]), "others": spread_of(x[~closed])} for name, x in columns.items()}).T.rename_axis("median over heads [middle 80 %]")

# %% [markdown]
# **Reading. Half of the heads of SmolLM2-135M-Instruct are sinks, and a sink keeps its *share* of the weight as the context grows, so it is hardly a gate that follows the length.**
#
# - *Where*: all of them are beyond the first third of the layers, and they are sinks of whatever token comes first: with BOS or without, half of the heads hold more than .3 of their weight there, at every length from 64 on. The first token's value is nearly zero in the sinks, a twenty-fifth of the others' in the median.
# - *Their mass does not do what a logit that stands still would do.* By (43.6) a sink that holds .53 at 1,024 would have held .94 at 64; it held .62. In keys, the weight of a sink grows with the context, from 81 to 1,693 in the median; the odds of $1 - m$ double not with each doubling of the length but with every fourteenth.
# - *Sample size*: (43.1) holds all the same: a sink caps $n$ for good. In the median sink $n$ grows by .04 of a doubling per doubling of the length, in the other heads by .24. And so does what the paper's argument needs: $\lambda_{\text{obs}}$ of a sink grows by .03, of the others by .28.
# - *The sink is not the whole reason.* Without the first token (dashed) $n$ grows by .30 instead of .24 in the mean over all heads: other weights gather on few keys, too.
# - *The heads lie where chapter 43's formulas put them*, no dot above $1/m^2$; most sinks lie to the left of the point beyond which closing further makes a head surer, with a precision near the lowest that (43.3) allows.
# - *The filter*, calibrated and not trained, has odds that follow the length, by a tenth of a doubling, also where the same tokens are read behind longer contexts; nearly all of it in its first third of layers ([below](#layer-by-layer)). In the gain itself that is next to nothing, since at the shipped start it is near 1: it goes from .987 to .989.
#
# ### After fine-tuning
#
# The same model, the same steps on the same texts, all weights trained, BOS in front.

# %%
table("tuned")

# %% [markdown]
# **Reading. After forty steps a gate is flat, and the odds of the filter's gain follow the length as before training.**
#
# - *Gates and gain*: the gates' log-odds change by .001 or .002 per doubling of the length, those of the filter's gain by .09. In what they multiply, both move little: the gain from .969 to .974.
# - *Sinks*: forty steps on 80 texts remove none from the plain model, from the filter, or with elementwise gates: half of the heads remain sinks. Headwise gates bring the share from .53 to .41.
# - *Loss*: gates cost some here, .02 nats headwise and .07 elementwise; their rate, 100 times that of the pretrained weights, was not tuned.
# - What remains open: more steps may do more; this is a statement about forty.
#
# ### From scratch
#
# BOS in front. *Plain, × .3* is the null: a plain model whose attention writes .3 of what it finds into the residual, about the mean of the filter's gain. *No gain* is the filter with $K = 1$: precision weighs the keys, nothing else.

# %%
table("scratch")

# %% [markdown]
# All arms of the table have one learning rate. Losses at other rates, and the slope of the filter's gain, means over seeds; then a figure of gate and gain in all three studies:

# %%
any_lr = {of: {name: value for name, value in budget.items() if name != "lr"} for of, budget in budgets.items() if of == "scratch"}
tried = choose(sink_rows(source, any_lr or budgets), split="bos")
if "lr" in tried:
    tried = tried[tried["metric"].isin(["loss", "slope.gain_odds"])]
    tried = tried.pivot_table(index=["metric", "arm"], columns="lr", values="value", sort=False).sort_index(axis=1).sort_index(level="metric", sort_remaining=False)
tried.map(lambda x: "" if math.isnan(x) else f"{x:.3f}") if "lr" in tried.columns.names else "no rows yet"


# %%
def draw_length(upper: plt.Axes, lower: plt.Axes, of: str) -> None:
    "Gate and gain of a study against the length of the context, and their log-odds relative to length 64."
    for (arm, s), values in cells(of).items():
        name = method_of(arm)
        kind = "gate" if METHODS[name].added == "gate" else "gain"
        value, odds = (curve(values, x).loc[64:] for x in (kind, f"{kind}_odds"))
        if len(value):
            style = dict(color=COLOUR[ROLES[name]], linestyle=STYLES[name])
            upper.plot(value.index, value, **style, label=arm if s == min(seed for a, seed in cells(of) if a == arm) else None)
            lower.plot(odds.index, (odds - odds.iloc[0]) / math.log(2), **style)


# %%
#| label: fig-length
#| fig-cap: "Above: gate and gain against the length of the context, mean over heads and texts; a column for each study (note the scales). Below: log-odds, base 2, relative to length 64; the thin line doubles with the context, a flat one knows nothing of it (the learnt sink logit's leaves the axes). BOS in front. The filter stands at the shipped start where it is pretrained or tuned."
#| code-fold: true
shown = [of for of in BUDGETS if cells(of)]
lengths = 2 ** np.arange(6, 11)
fig, axes = plt.subplots(2, len(shown), figsize=(1.9 * len(shown) + 0.6, 3.3), squeeze=False, sharex=True, dpi=100)
for (upper, lower), of in zip(axes.T, shown):
    draw_length(upper, lower, of)
    lower.plot(lengths, np.log2(lengths / 64), color=COLOUR["prior"], linewidth=0.6)
    upper.set(title=of)
    lower.set_xscale("log", base=2)
    lower.set(ylim=(-0.25, 1.25), xlabel="length [tokens]", xticks=lengths[::2], xticklabels=lengths[::2])
axes[0, 0].set(ylabel="gate g, gain K [1]")
axes[1, 0].set(ylabel="change of log₂ odds")
fig.legend(*axes[0, -1].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# **Reading. From scratch the gates are flat and the gain is not, which is the paper's contrast, but it is not robust; and at this size and budget the filter learns faster because its update is smaller, not because it knows which update to trust.**
#
# - *Sinks*: in 420 steps no arm grows one, so there is none to remove here.
# - *Gates and gain, at this learning rate*: the log-odds of both sigmoid gates change by nothing that the intervals can tell from zero, those of the filter's gain by .15 and .16 per doubling in two seeds (.17 where the same tokens are read behind longer contexts), as its sample size grows by .46 and .36. That is a seventh of what a head that reads everything alike would show, and a mean over layers of which one does most of it (below).
# - *Not robust*: at twice the learning rate the slope is −.01. What the gain does depends on what the network has learnt to need; following the length is in its reach, and not in a sigmoid gate's, but nothing makes it.
# - *A learnt sink logit*: its odds rise with a slope of more than 1, the slope that (43.6) gives to logits that stand still: the best matches of a longer context are better. By then the logit holds next to no mass.
# - *The filter's loss is .55 to .58 below that of the plain model, and the null's is lower still.* Precision in the weights without a gain (*no gain*) does nothing for the loss; a constant factor of .3 on what attention writes does all of it, and a little more than the filter. The rate is not the reason either: the plain model at its best of three stays .53 above the filter at its best of two.
#
# ### Layer by layer
#
# Means over heads and layers hide where a gain follows the context, and slopes of opposite sign. So here is each layer, means over its heads: how closed it is at the longest context (figure), and the change per doubling of $\log_2 n$ and of the $\log_2$ odds of gate or gain (in the table the median over layers and the middle 80 %); and the steepest single head, up or down (a gain belongs to all heads of a layer).


# %%
def by_layer(found: dict[str, np.ndarray]) -> pd.DataFrame:
    "Of each layer: mean mass on the first token at the longest context, and slopes, means over heads."
    columns = {"mass": found["mass"][..., -1].mean(1), "log₂ n": head_slopes(np.log2(found["n_eff"]), found["high"]).mean(1)}
    odds = next((name for name in ("gate_odds", "gain_odds") if name in found), None)
    if odds:
        of_heads = head_slopes(found[odds] / math.log(2), found["high"])
        columns |= {"log₂ odds": of_heads.mean(1), "steepest": np.abs(of_heads).max(1)}
    return pd.DataFrame(columns)


# %%
layers = {}
for of in BUDGETS:
    for (arm, s), _ in cells(of).items():
        if s == 0:
            layers[of, arm] = by_layer(arrays_of(choose(stored, study=of, arm=arm, split="bos", seed=s)))
summary = lambda frame: {"log₂ n": spread_of(frame["log₂ n"]), **({"log₂ odds": spread_of(frame["log₂ odds"]), "steepest head": f"{frame['steepest'].max():.2f}"} if "log₂ odds" in frame else {})}
pd.DataFrame({key: summary(frame) for key, frame in layers.items()}).T.fillna("") if layers else "no rows yet"

# %%
#| label: fig-layers
#| fig-cap: "Layer by layer, BOS in front: mass on the first token at the longest context, and the change of log₂ n and of the log-odds of gate or gain per doubling of the length. Above SmolLM2, pretrained (thin) and after fine-tuning; below the models from scratch, without the sink logit."
#| code-fold: true
fig, axes = plt.subplots(2, 3, figsize=(6.4, 3.8), dpi=72)
for (of, arm), frame in layers.items():
    name = method_of(arm)
    style = dict(color=COLOUR[ROLES[name]], linestyle=STYLES[name], linewidth=0.8 if of == "pretrained" else 1.4)
    for ax, column in zip(axes[int(of == "scratch")], frame):
        if name != "sink" and arm in (ARMS[name], titled(name, "shipped")):
            ax.plot(frame.index, frame[column], **style, label=ARMS[name] if of == "tuned" else None)
for row in axes:
    for ax, ylabel in zip(row, ("mass on first token", "log₂ n per doubling", "odds per doubling")):
        ax.axhline(0, color="0.8", linewidth=0.6)
        ax.set(ylabel=ylabel)
for ax in axes[1]:
    ax.set_xlabel("layer")
if layers:
    fig.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# **Reading. In SmolLM2 the gain follows the length in the first third of the layers, most in the very first, and hardly beyond.**
#
# - *SmolLM2*: sample sizes grow most there, too: the first layers read broadly, the later ones through sinks.
# - *From scratch* one layer of eight, the second, makes most of the mean slope; in the median layer it is .05, and in some it is below zero.
# - *Gates* are flat in the mean over the heads of each layer; single headwise gates have slopes up to .05 either way.
#
# ### Caveats
#
# - Position stands for length in tables and figures by length: late queries are also other text than early ones. The column *same tokens* is free of that, but has fewer lengths.
# - The models from scratch are small and see each paragraph at most once; large models grow sinks over billions of tokens [@gu2025sink].
# - Blocks cut paragraphs, and a text goes on from one article into the next. Nothing keeps attention within an article.
# - Intervals draw texts, six to twenty-four of them, not training runs; of so few a bootstrap says less than 95 %.

# %%
#| hide
if source != results_folder():
    here.cleanup()
