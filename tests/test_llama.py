"A converted language model: the plain one when switched off, the filter of chapters 10 to 22 when on, and whole in every use."

import copy
import json
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from helpers import two_processes
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, MistralConfig, MistralForCausalLM, Qwen2Config,
    Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM, StaticCache, Trainer, TrainingArguments,
)  # fmt: skip
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from bft_nb.attention import observe
from bft_nb.core import Belief
from bft_nb.dynamics import gated_ffn_jacobian, predict, standardise
from bft_nb.kalman import gain, update
from bft_nb.layer import project, reliability
from bft_nb.llama import (
    FAMILIES, BFTLlamaConfig, BFTLlamaForCausalLM, LayerFilter, calibrate, convert, from_channels, layer_filters, pack, parameter_groups, to_channels, trace, unpack,
)  # fmt: skip
from bft_nb import models
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.qa import load_questions, own_file

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
PLAIN = {
    "llama": lambda **more: LlamaForCausalLM._from_config(LlamaConfig(**SIZES, **more), attn_implementation="eager"),
    "mistral": lambda **more: MistralForCausalLM._from_config(MistralConfig(**SIZES, **{"sliding_window": 6, **more}), attn_implementation="eager"),
    "qwen2": lambda **more: Qwen2ForCausalLM._from_config(Qwen2Config(**SIZES, **more), attn_implementation="eager"),
    "qwen3": lambda **more: Qwen3ForCausalLM._from_config(Qwen3Config(**SIZES, head_dim=16, **more), attn_implementation="eager"),
    "smollm3": lambda **more: SmolLM3ForCausalLM._from_config(SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1], **more), attn_implementation="eager"),
}
families = pytest.mark.parametrize("name", PLAIN)
STRONG = dict(beta_a=1.0, beta_g=1.0)  # the paper's form: nothing about the precision can hide


def plain(name="llama", seed=0, **more):
    torch.manual_seed(seed)
    model = PLAIN[name](**more).eval()
    for p in model.parameters():  # norms and biases too, or a mistake with them would not show
        if p.ndim == 1:
            p.data += 0.2 * torch.randn_like(p)
    return model


def batch(b=2, t=10, pad=0, side="left", seed=1):
    ids = torch.randint(2, 97, (b, t), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if pad:
        where = slice(0, pad) if side == "left" else slice(t - pad, t)
        ids[0, where], mask[0, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def strong(name="llama", **more):
    model = calibrate(convert(plain(name), **STRONG, **more), batch(4, 20, seed=7))
    with torch.no_grad():
        for bft in layer_filters(model):  # away from the start, so that each parameter matters
            for p in bft.parameters():
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


@torch.no_grad()
def logits(model, **inputs):
    return model(**inputs).logits


# what every converted model owes, gated ones as well (test_gates)


def check_rows_are_independent(model, inputs):
    "A padded batch says of each row what the row alone does."
    real = inputs["attention_mask"].bool()
    together = logits(model, **inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0))
    for row in range(len(real)):
        alone = logits(model, input_ids=inputs["input_ids"][row][real[row]][None])
        assert_close(together[row][real[row]], alone[0], atol=1e-4, rtol=1e-4)


def check_token_by_token(model, kind):
    "Pieces through a cache, \"dynamic\" or \"static\", say what the full pass does."
    ids = batch(2, 14)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=20) if kind == "static" else None
    found = []
    with torch.no_grad():
        for part in ids.split([5, 1, 3, 1, 4], 1):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    assert_close(torch.cat(found, 1), logits(model, input_ids=ids), atol=1e-4, rtol=1e-4)


implementations = pytest.mark.parametrize("impl", ["bft", "bft_blocked"])


def check_generation(model, inputs):
    "Greedy and beam search find the same with a cache and without; the greedy tokens."
    ways = ({}, {"num_beams": 3})
    found = [[model.generate(**inputs, max_new_tokens=6, do_sample=False, **way, **more) for more in ({}, {"use_cache": False})] for way in ways]
    assert all(torch.equal(cached, full) for cached, full in found)
    return found[0][0]


# switched off


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", [0, 3])
def test_switched_off_it_is_the_plain_model_bit_by_bit(name, dtype, pad):
    model = plain(name).to(dtype)
    inputs = batch(pad=pad)
    expected = logits(model, **inputs)
    off = calibrate(convert(copy.deepcopy(model), beta_a=0.0, beta_g=0.0), inputs)
    assert torch.equal(logits(off, **inputs), expected)
    assert not torch.equal(logits(convert(model, beta_a=0.5, beta_g=0.1), **inputs), expected)


@families
def test_switched_off_it_generates_what_the_plain_model_does(name):
    model, inputs = plain(name), batch(pad=3)
    off = convert(copy.deepcopy(model), beta_a=0.0, beta_g=0.0)
    for options in (dict(do_sample=False), dict(num_beams=3), dict(do_sample=False, cache_implementation="static")):
        assert torch.equal(off.generate(**inputs, max_new_tokens=8, **options), model.generate(**inputs, max_new_tokens=8, **options)), options


def test_packed_positions_are_kept_apart():
    model, ids = strong(), batch(1, 10)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    together = logits(model, input_ids=ids, position_ids=positions, use_cache=False)
    apart = torch.cat([logits(model, input_ids=ids[:, :4]), logits(model, input_ids=ids[:, 4:])], 1)
    assert_close(together, apart, atol=1e-4, rtol=1e-4)


# the equations


def reference_layer(layer, belief, cos_sin):
    "A filter step on a Belief with the functions of chapters 12, 13, 20 and 21, for β = 1; no packing, no transformers."
    attn, mlp, norm1, norm2, bft = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm, layer.bft
    x = norm1(belief.mean)
    q, k, v = (f(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
    cos, sin = (y[:, None] for y in cos_sin)
    turn = lambda y: torch.cat([-y[..., y.shape[-1] // 2 :], y[..., : y.shape[-1] // 2]], -1)
    q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    # values in the unit of the stream, so that s₀² needs no factor: λ_obs is that of v divided by it
    scale = bft.value_scale.sqrt()[:, None, None]
    seen = observe(q, k, v / scale, reliability(belief), is_causal=True, resolution="isotropic", impl="explicit")
    seen = seen._replace(mean=seen.mean * scale, precision=seen.precision / scale.square())
    observation = project(seen, attn.o_proj.weight, attn.o_proj.bias)
    posterior = update(belief, observation)
    y = norm2(posterior.mean)
    gate, up = mlp.gate_proj(y), mlp.up_proj(y)
    delta = mlp.down_proj(mlp.act_fn(gate) * up)
    if bft.last:
        return posterior._replace(mean=posterior.mean + delta), observation, seen.n_eff
    xhat, inv_std = standardise(posterior.mean, "rms", norm2.variance_epsilon)
    jac = gated_ffn_jacobian(gate, up, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, "silu", norm="rms", xhat=xhat, inv_std=inv_std, norm_weight=norm2.weight)
    noise = bft.noise_scale * nn.functional.softplus(bft.raw_noise)
    return predict(posterior, delta, jac, noise), observation, seen.n_eff


def in_float64(model, monkeypatch):
    "The paper's β, in float64, also where transformers' norm insists on float32."
    for bft in layer_filters(model):
        bft.beta_a.data.fill_(1)
        bft.root_beta_g.data.fill_(1)
    for norm in model.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            monkeypatch.setattr(norm, "forward", lambda h, norm=norm: norm.weight * standardise(h, "rms", norm.variance_epsilon)[0])
    return model.double()


@implementations
@torch.no_grad()
def test_the_layers_are_the_librarys_filter_steps_in_float64(impl, monkeypatch):
    model, ids = in_float64(strong(attn_implementation=impl), monkeypatch), batch()["input_ids"]
    records = trace(model, input_ids=ids)
    h = model.model.embed_tokens(ids)
    cos_sin = model.model.rotary_emb(h, torch.arange(ids.shape[1])[None])
    first = layer_filters(model)[0]
    belief = Belief(h, first.tau_scale * first.tau(ids, standardise(h, "rms", model.config.rms_norm_eps)[0]))
    for layer, record in zip(model.model.layers, records, strict=True):
        assert_close(record.belief, belief)
        prior, (belief, observation, n_eff) = belief, reference_layer(layer, belief, cos_sin)
        assert_close(record.observation, observation)
        assert_close(record.n_eff, n_eff)
        assert_close(record.gain, gain(prior.precision, observation.precision))
        assert 0.01 < record.gain.mean() < 0.99, "a gain at either end would prove nothing"
    assert_close(logits(model, input_ids=ids), model.lm_head(model.model.norm(belief.mean)))


def test_the_tempered_form_has_powers_of_precision_as_weights():
    model = strong()
    for bft in layer_filters(model):
        bft.beta_a.data.fill_(0.3)
    record = trace(model, **batch())[1]
    model.model.layers[1].bft.beta_a.data.fill_(0.0)
    flat = trace(model, **batch())[1]
    expected = flat.weights * record.lam_bar[:, None, None] ** 0.3  # α λ̄^β, (40.2)
    assert_close(record.weights, expected / expected.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)


@families
def test_blocked_and_explicit_attention_agree(name):
    inputs = batch(2, 40, pad=5)
    one, two = strong(name), strong(name, attn_implementation="bft_blocked")
    real = inputs["attention_mask"].bool()
    assert_close(logits(one, **inputs)[real], logits(two, **inputs)[real], atol=1e-4, rtol=1e-4)
    grads = []
    for model in (one, two):
        model(**inputs, labels=inputs["input_ids"].masked_fill(~real, -100)).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert_close(*grads, atol=1e-4, rtol=1e-3)


def test_normalised_units_do_not_depend_on_the_scale_of_the_stream():
    weights = []
    for scale in (1.0, 30.0):
        model = plain()
        for part in [model.model.embed_tokens, *(f for layer in model.model.layers for f in (layer.self_attn.o_proj, layer.mlp.down_proj))]:
            part.weight.data *= scale  # all that is written into the stream
        for norm in (f for layer in model.model.layers for f in (layer.input_layernorm, layer.post_attention_layernorm)):
            norm.variance_epsilon *= scale**2
        convert(model, units="normalised", **STRONG)  # not calibrated: one scale serves all
        for bft in layer_filters(model):
            bft.value_scale.fill_(0.5)
        weights.append([r.weights for r in trace(model, **batch())])
    assert_close(*weights, rtol=1e-3, atol=1e-5)


# padding, batches, caches


@families
@implementations
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_the_rest_of_the_batch_change_nothing(name, impl, side):
    check_rows_are_independent(strong(name, attn_implementation=impl), batch(3, 12, pad=5, side=side))


@families
@implementations
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_token_by_token_equals_the_full_pass(name, impl, kind):
    check_token_by_token(strong(name, attn_implementation=impl), kind)


@families
def test_a_half_precision_cache_keeps_the_precision_exactly(name):
    model, ids = strong(name).to(torch.bfloat16), batch(2, 12)["input_ids"]
    whole = trace(model, input_ids=ids)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :11], use_cache=True).past_key_values
    kept = from_channels(cache.layers[0].keys[:, 0, :, cache.layers[0].values.shape[-1] :])  # the window of a sliding one
    assert torch.equal(kept, whole[0].lam_bar[:, 11 - kept.shape[1] : 11].log()) and not torch.equal(kept, kept.bfloat16().float())
    last = trace(model, input_ids=ids[:, 11:], past_key_values=cache, use_cache=True)
    assert_close(last[0].weights[..., -6:], whole[0].weights[:, :, -1:, -6:], atol=1e-2, rtol=1e-2)
    for x in (torch.tensor([[3.14159265, -11.718281, 1e-3]]), torch.randn(1, 1000) * 8):
        assert torch.equal(from_channels(to_channels(x, torch.bfloat16)), x)
        assert torch.equal(from_channels(to_channels(x, torch.float32)), x)


@families
@implementations
def test_generation(name, impl):
    model, inputs = strong(name, attn_implementation=impl), batch(2, 9, pad=3)
    greedy = check_generation(model, inputs)
    assert torch.equal(greedy, model.generate(**inputs, max_new_tokens=6, do_sample=False, cache_implementation="static"))
    torch.manual_seed(0)
    sampled = model.generate(**inputs, max_new_tokens=6, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(sampled, model.generate(**inputs, max_new_tokens=6, do_sample=True, use_cache=False))
    alone = model.generate(input_ids=inputs["input_ids"][:1, 3:], max_new_tokens=6, do_sample=False)
    assert torch.equal(alone[0, -6:], greedy[0, -6:])


# training


def step(model, **inputs):
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@families
@implementations
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(name, impl, reentrant):
    inputs = batch()
    one, two = (strong(name, attn_implementation=impl).train() for _ in range(2))
    two.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        two.enable_input_require_grads()
    (loss, grads), (loss_again, grads_again) = step(one, **inputs), step(two, **inputs)
    assert torch.equal(loss, loss_again)
    assert_close(grads, grads_again, rtol=0, atol=0)


def test_every_parameter_has_a_gradient_from_the_first_step():
    _, grads = step(calibrate(convert(plain()), batch()), **batch())
    still = {n for n, g in grads.items() if not g.abs().max() > 1e-7}
    # all τ are equal at the start: nothing for the first layer's β_a to weigh, nothing behind the zero matrix
    assert still == {"model.layers.0.bft.beta_a", "model.layers.0.bft.tau.net.0.weight", "model.layers.0.bft.tau.net.0.bias"}
    assert not any("layers.2.bft.raw_noise" in n for n in grads), "the last layer has no process noise"
    _, grads = step(strong(), **batch())
    assert all(g.abs().sum() > 0 for g in grads.values())


def test_beta_g_never_becomes_negative():
    model = convert(plain(), beta_g=0.01)
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1e-9, precision_lr=1.0), lr=1.0)
    for _ in range(3):
        for bft in layer_filters(model):
            bft.root_beta_g.grad = torch.full((1,), 0.15)
        optimizer.step()
    assert all(bft.beta_g.item() > 0 for bft in layer_filters(model))
    assert all((r.gain >= 0).all() and (r.gain <= 1).all() for r in trace(model, **batch()))


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(autocast):
    model = strong()
    exact = logits(model, **batch())
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(), labels=batch()["input_ids"]).loss
            loss.backward()
            found = logits(model, **batch())
    else:
        model.to(torch.bfloat16)
        found = logits(model, **batch())
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert all(r.belief.precision.dtype == torch.float32 for r in trace(model, **batch()))
    assert torch.isfinite(found).all() and all(torch.isfinite(p.grad).all() for p in model.parameters())
    plain_error = (logits(plain().to(torch.bfloat16), **batch()).float() - logits(plain(), **batch())).square().mean().sqrt()
    assert (found.float() - exact).square().mean().sqrt() < 4 * plain_error


def test_loaded_in_bfloat16_the_precision_stays_float32(tmp_path):
    strong().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert {x.dtype for bft in layer_filters(model) for x in bft.state_dict().values()} == {torch.float32}


def test_extreme_scales_stay_finite():
    for scale in (1e-3, 1e3):
        model = plain()
        model.model.embed_tokens.weight.data *= scale
        convert(model, **STRONG)
        assert torch.isfinite(logits(model, **batch())).all()
        _, grads = step(model, **batch())
        assert all(torch.isfinite(g).all() for g in grads.values())
    assert torch.isfinite(logits(strong(), input_ids=torch.tensor([[5]]))).all()
    assert torch.isfinite(logits(strong(), input_ids=torch.full((1, 12), 5))).all()  # equal tokens: equal values


def test_parameter_groups_hold_each_parameter_once():
    model = strong()
    groups = parameter_groups(model, lr=1e-4, precision_lr=1e-2, weight_decay=0.1)
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-2, 0.0)]
    assert {id(p) for bft in layer_filters(model) for p in bft.parameters()} == {id(p) for p in groups[2]["params"]}
    with pytest.raises(ValueError, match="precision_lr must be positive and finite, got -1"):
        parameter_groups(model, lr=1e-4, precision_lr=-1.0)
    with pytest.raises(TypeError, match="no added parts"):
        parameter_groups(plain(), lr=1e-4)


def test_trainer(tmp_path):
    model = calibrate(convert(plain()), batch())
    data = [{"input_ids": x, "labels": x} for x in batch(6, 8)["input_ids"]]
    named = [(i, name, p) for i, bft in enumerate(layer_filters(model)) for name, p in bft.named_parameters()]
    before = [p.clone() for _, _, p in named]
    arguments = TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, precision_lr=1e-2))
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and len(set(losses)) == 3
    still = [(i, name) for (i, name, p), was in zip(named, before, strict=True) if torch.equal(p, was)]
    assert still == []


# peft, saving, loading


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], modules_to_save=["bft"]))


def test_lora_trains_saves_and_loads_the_precision(tmp_path):
    peft = pytest.importorskip("peft")
    base = plain()
    tuned = lora(calibrate(convert(copy.deepcopy(base)), batch())).train()
    optimizer = torch.optim.AdamW(parameter_groups(tuned, lr=1e-2, precision_lr=1e-1))
    losses = []
    for _ in range(5):
        loss = tuned(**batch(), labels=batch()["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned.save_pretrained(tmp_path)
    tuned.eval()
    again = peft.PeftModel.from_pretrained(convert(copy.deepcopy(base)), tmp_path).eval()
    assert torch.equal(logits(again, **batch()), logits(tuned, **batch()))
    with again.disable_adapter():
        assert_close(logits(again, **batch()), logits(convert(base), **batch()))
    merged = tuned.merge_and_unload()
    assert_close(logits(merged, **batch()), logits(again, **batch()), atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), **batch()), logits(merged, **batch()))


@pytest.mark.parametrize("other", [dict(units="normalised"), dict(jacobian="none")])
def test_an_adapter_of_another_form_of_filter_is_refused(other, tmp_path):
    peft = pytest.importorskip("peft")
    lora(convert(plain(), **other)).save_pretrained(tmp_path)
    assert peft.PeftModel.from_pretrained(convert(plain(), **other), tmp_path)
    with pytest.raises(ValueError, match=r"of a filter with units=.*, but the model was converted with units='stream' and jacobian≠'none': give convert the same"):
        peft.PeftModel.from_pretrained(convert(plain()), tmp_path)


@families
def test_pickling(name):
    model = convert(plain(name))
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), **batch()), logits(model, **batch()))


def test_lora_with_gradient_checkpointing_and_generation():
    tuned = lora(strong()).train()
    tuned.gradient_checkpointing_enable({"use_reentrant": False})
    tuned(**batch(), labels=batch()["input_ids"]).loss.backward()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
    assert len(trace(tuned.eval(), **batch())) == 3
    assert tuned.generate(**batch(), max_new_tokens=3).shape[1] == 13


@families
@pytest.mark.parametrize("tied", [False, True])
def test_saving_and_loading(name, tied, tmp_path):
    model = calibrate(convert(plain(name, tie_word_embeddings=tied), beta_a=0.7, units="normalised", jacobian="none"), batch())
    with torch.no_grad():
        for bft in layer_filters(model):
            bft.root_beta_g += 0.3
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bft_units"] == "normalised"
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), FAMILIES[name].causal_lm.from_pretrained(tmp_path)):
        assert type(loaded) is type(model) is FAMILIES[name].causal_lm
        assert isinstance(AutoConfig.from_pretrained(tmp_path), FAMILIES[name].config)
        assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
        assert torch.equal(logits(loaded.eval(), **batch()), logits(model, **batch()))


@families
def test_a_plain_checkpoint_in_a_filtering_class(name, tmp_path):
    model = plain(name)
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[name].causal_lm.from_pretrained(tmp_path, bft_beta_a=0.5).eval()
    assert_close(dict(loaded.state_dict()), dict(convert(model, beta_a=0.5).state_dict()) | {k: v for k, v in loaded.state_dict().items() if ".tau.net.0" in k})
    first = layer_filters(loaded)[0].tau.net[0].weight
    assert torch.isfinite(first).all() and 0 < first.std() < 1
    inner = FAMILIES[name].model.from_pretrained(tmp_path)
    assert [bft.beta_g.item() for bft in layer_filters(inner)] == pytest.approx([0.01] * 3)


def test_a_filtering_model_from_its_configuration():
    model = BFTLlamaForCausalLM(BFTLlamaConfig(**SIZES, bft_beta_g=0.25))
    assert [bft.beta_g.item() for bft in layer_filters(model)] == [0.25] * 3
    assert model.config._attn_implementation == "bft"
    step(model, **batch())


def test_the_hidden_states_and_attentions_that_users_ask_for():
    for name in [name for name in _CAN_RECORD_REGISTRY if "BFT" in name]:  # as if none of ours had been constructed before
        del _CAN_RECORD_REGISTRY[name]
    model, inputs = strong(), batch()
    out = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 10, 32)] * 4
    assert all(torch.equal(w, r.weights) for w, r in zip(out.attentions, trace(model, **inputs), strict=True))
    assert isinstance(model(**inputs, return_dict=False), tuple)


# two processes


SCRIPT = """
import json
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import test_llama as t
dist.init_process_group("gloo")
model = t.tunable({adapter!r})
both = DistributedDataParallel(model)
losses = []
for loss in t.steps(both, model, t.batch(4)["input_ids"].chunk(2)[dist.get_rank()]):  # a parameter without gradient would be an error in the second step
    dist.all_reduce(loss)
    losses.append(loss.item() / 2)
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def tunable(adapter):
    model = calibrate(convert(plain()), batch())
    torch.manual_seed(0)  # of the low-rank matrices
    return lora(model).train() if adapter == "lora" else model


def steps(wrapped, model, rows):
    "Three steps of training, the loss before each."
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.1), lr=0.1)
    for _ in range(3):
        loss = wrapped(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach().clone()


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_two_processes_train_as_one_does(adapter, tmp_path):
    said = two_processes(tmp_path, SCRIPT.format(adapter=adapter))
    model = tunable(adapter)
    losses = [loss.item() for loss in steps(model, model, batch(4)["input_ids"])]
    assert_close(json.loads(said.splitlines()[-1]), losses, rtol=1e-4, atol=1e-5)
    assert losses[-1] < losses[0]


# what is refused, and what it costs


def test_other_models_are_refused_by_name():
    gemma = Gemma2ForCausalLM(Gemma2Config(**{**SIZES, "num_hidden_layers": 1, "head_dim": 8}))
    with pytest.raises(TypeError, match="takes one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM, got Gemma2ForCausalLM"):
        convert(gemma)
    with pytest.raises(TypeError, match="got BFTLlamaForCausalLM"):
        convert(convert(plain()))
    with pytest.raises(TypeError, match="got LlamaModel"):
        convert(LlamaModel(LlamaConfig(**SIZES)))
    with pytest.raises(TypeError, match="got PeftModel"):
        convert(pytest.importorskip("peft").get_peft_model(plain(), pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("wrong, says", [
    (dict(beta_g=-0.1), "bft_beta_g must be ≥ 0 and finite, got -0.1"),
    (dict(beta_a=float("nan")), "bft_beta_a must be a finite number, got nan"),
    (dict(noise_ratio=0.0), "bft_noise_ratio must be positive and finite, got 0.0"),
    (dict(units="rms"), "bft_units must be one of 'stream', 'normalised', got 'rms'"),
    (dict(jacobian="yes"), "bft_jacobian must be one of 'detached', 'full', 'none', got 'yes'"),
    (dict(attn_implementation="sdpa"), "attn_implementation must be one of 'bft', 'bft_blocked', got 'sdpa'"),
])  # fmt: skip
def test_wrong_settings_are_refused_and_leave_the_model_alone(wrong, says):
    model = plain()
    with pytest.raises(ValueError, match=re.escape(says)):
        convert(model, **wrong)
    assert type(model) is LlamaForCausalLM and not any(isinstance(m, LayerFilter) for m in model.modules())


def test_wrong_use_is_refused():
    model = convert(plain())
    with pytest.raises(ValueError, match="batch must hold input_ids"):
        calibrate(model, {"labels": torch.ones(1, 2)})
    with pytest.raises(TypeError, match="LlamaForCausalLM has no filtering layers"):
        trace(plain(), **batch())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation must be one of 'bft', 'bft_blocked', got 'sdpa'"):
        model(**batch())
    other = plain()
    other.set_attn_implementation("bft")
    with pytest.raises(ValueError, match="its layer is not a filtering one"):
        other(**batch())


def test_dropout_needs_the_explicit_attention():
    model = convert(plain(attention_dropout=0.5), attn_implementation="bft_blocked").train()
    with pytest.raises(ValueError, match="attention_dropout must be 0 with 'bft_blocked', got 0.5"):
        model(**batch())
    found = []
    for model in (plain(attention_dropout=0.5), convert(plain(attention_dropout=0.5), beta_a=0.0, beta_g=0.0)):
        torch.manual_seed(0)
        found.append(model.train()(**batch()).logits)
    assert torch.equal(*found) and not torch.equal(found[0], logits(plain(), **batch()))


@pytest.mark.parametrize("mask", [None, [[1, 0, 0], [0, 1, 0]]])
def test_calibration_needs_two_tokens(mask):
    ids = torch.tensor([[5], [6]]) if mask is None else torch.tensor([[5, 6, 7], [8, 9, 10]])
    given = {"input_ids": ids} | ({} if mask is None else {"attention_mask": torch.tensor(mask)})
    with pytest.raises(ValueError, match="two tokens at least"):
        calibrate(convert(plain()), given)


def test_calibration_ignores_padding_and_leaves_the_mode():
    one, two = (convert(plain()).train() for _ in range(2))
    ids = batch(1, 8)["input_ids"]
    calibrate(one, {"input_ids": ids})
    calibrate(two, {"input_ids": torch.cat([ids, ids], 1), "attention_mask": torch.arange(16)[None] < 8})
    assert_close(dict(one.state_dict()), {k: v for k, v in two.state_dict().items()} | {k: v for k, v in one.state_dict().items() if ".tau.net.0" in k}, rtol=1e-4, atol=1e-6)
    assert one.training and layer_filters(one)[0].calibrating is None


def test_the_packed_tensor():
    belief = Belief(torch.randn(2, 3, 4).bfloat16(), torch.rand(2, 3, 4) + 0.1)
    back = unpack(pack(belief), torch.bfloat16)
    assert pack(belief).dtype == torch.float32 and torch.equal(back.mean, belief.mean)
    assert_close(back.precision, belief.precision)


def test_tinyllama_pays_less_than_a_thousandth():
    "The configuration of TinyLlama-1.1B, without memory."
    with torch.device("meta"):
        config = BFTLlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048
        )
        model = BFTLlamaForCausalLM(config)
    extra = sum(p.numel() for bft in layer_filters(model) for p in bft.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert total - extra == 1_100_048_384  # what TinyLlama-1.1B has
    assert extra == 22 * 2 + 21 * 2048 + (2048 * 16 + 16 + 16 + 1)
    assert extra / total < 1e-3


@pytest.mark.skipif(not models.is_fetched("smollm2") or not own_file("squad_v1.1_dev.parquet"), reason="needs smollm2 in the cache (bft models fetch smollm2) and squad_v1.1_dev in BFT_DATA")
def test_a_pretrained_model_survives_and_its_precision_lives():
    "The shipped start on real text: 4 paragraphs of Wikipedia to be read, 4 others to set the scales."
    model, tokenizer = models.load_model("smollm2")
    texts = list(dict.fromkeys(q.context for q in load_questions("squad_v1.1_dev")))[:: 2067 // 8][:8]
    read, scales = (tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=128) for part in (texts[:4], texts[4:]))
    labels = read["input_ids"].masked_fill(read["attention_mask"] == 0, -100)
    with torch.no_grad():
        before = model(**read, labels=labels).loss
        calibrate(convert(model), scales)
        after = model(**read, labels=labels).loss
    assert before < 4 and abs((after - before).exp() - 1) <= 0.01  # perplexity
    real = read["attention_mask"].bool()
    spread = [record.lam_bar[real].log().std().item() for record in trace(model, **read)]
    assert len(spread) == 30 and min(spread[10:20]) > 0.05, spread


SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.skipif(not models.is_fetched("smollm2"), reason="needs smollm2 in the cache (bft models fetch smollm2)"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("of", ["tiny", SMOLLM2])
def test_the_opening_of_the_chapter_is_what_the_chapter_runs(of, tmp_path, caplog, capfd):
    twin = (Path(__file__).parent.parent / "nbs" / "_py" / "40_llama.py").read_text(encoding="utf-8")
    imports, shown = (block.replace("\n# ", "\n").replace("\n#\n", "\n\n")[2:].strip() for block in re.findall(r"# ```python\n(.*?)# ```", twin, re.DOTALL)[:2])
    assert len([line for line in f"{imports}\n{shown}".splitlines() if line]) <= 15
    assert shown in twin
    name = models.models_dir() / of
    if of == "tiny":
        name, tokenizer = tmp_path / of, tiny_tokenizer()
        for part in (tiny_llama(tokenizer, d=32), tokenizer):
            part.save_pretrained(name)
    space = {"name": str(name), "folder": str(tmp_path / "tuned"), "texts": ["A belief.", "A mean and a precision."]}
    exec(f"{imports}\n{shown}", space)
    assert space["generated"].shape[0] == 2 and (tmp_path / "tuned" / "adapter_model.safetensors").exists()
    with torch.no_grad():
        assert torch.equal(space["again"](**space["batch"]).logits, space["tuned"].eval()(**space["batch"]).logits)
    assert "You are using a model of type" not in caplog.text + capfd.readouterr().err
