"A gated language model: the plain one at the start, the closed form away from it, and whole in every use."

import json
import pickle
import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_llama import SIZES, batch, check_generation, check_rows_are_independent, check_token_by_token, families, logits, plain, step
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from bft_nb.gates import GATED, GATED_FAMILIES, GATES, Gate, GatedLlamaConfig, GatedLlamaForCausalLM, SinkGate, causal, convert_gated, gated_attention, trace_gates
from bft_nb.llama import added, convert, parameter_groups, trace

gates = pytest.mark.parametrize("gate", GATES)
query_gates = pytest.mark.parametrize("gate", ["headwise", "elementwise"])
IMPLEMENTATIONS = ["eager", "sdpa"]


def implemented(model, implementation):
    model.set_attn_implementation(implementation)
    return model


def strong(name="llama", gate="headwise", implementation="eager", **more):
    "Away from the start, so that each parameter matters."
    model = convert_gated(implemented(plain(name, **more), implementation), gate)
    with torch.no_grad():
        for part in added(model, Gate):
            for p in part.parameters():
                p += 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


# at the start


@families
@query_gates
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", [0, 3])
def test_at_the_start_it_is_the_plain_model_bit_by_bit(name, gate, implementation, dtype, pad):
    model, inputs = implemented(plain(name).to(dtype), implementation), batch(pad=pad)
    expected = logits(model, **inputs)
    assert torch.equal(logits(convert_gated(model, gate), **inputs), expected)


@families
@gates
def test_gradients_reach_every_parameter_from_the_first_step(name, gate):
    _, grads = step(convert_gated(plain(name), gate), **batch())
    assert all(g.abs().sum() > 0 for n, g in grads.items() if ".gate." in n) and any(".gate." in n for n in grads)


def test_a_plain_gated_model_pays_for_nothing_else():
    model = convert_gated(implemented(plain(), "sdpa"), "headwise")
    assert model.config._attn_implementation == "gated_sdpa"
    added_parameters = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in dict(plain().named_parameters())}
    assert added_parameters == {f"model.layers.{i}.self_attn.gate.weight": (4, 32) for i in range(3)}
    widths = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: widths.append(out.shape[-1]))
    assert all(out is None for out in model(**batch(), output_attentions=True).attentions) and widths == [32] * 3


# the closed forms


@families
@query_gates
@torch.no_grad()
def test_a_query_gate_is_the_sigmoid_of_a_linear_map_of_attentions_input(name, gate):
    model, calls, outs = strong(name, gate), [], []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: outs.append(args[0].unflatten(-1, (4, -1))))
    traced = trace_gates(model, **batch())
    for i, (attention, g) in enumerate(zip([layer.self_attn for layer in model.model.layers], traced, strict=True)):
        assert g.shape == (2, 10, 4, 1 if gate == "headwise" else attention.head_dim) and g.std() > 0.1
        assert_close(g.flatten(2), 2 / (1 + torch.exp(-calls[i]["hidden_states"] @ attention.gate.weight.T)))
        attention.gate.weight.zero_()  # g = 1
        attention(**calls[i])
        assert_close(outs[i], outs[-1] * g)


def random_attention(b=2, h=4, g=2, t=6, j=6, k=8, dtype=torch.float64):
    at = torch.Generator().manual_seed(0)
    q, key, v = (torch.randn(b, n, m, k, generator=at, dtype=dtype) for n, m in ((h, t), (g, j), (g, j)))
    return q, key, v, torch.randn(h, generator=at, dtype=dtype)


class Sinks(torch.nn.Module):
    "What the attention functions ask of their module."

    def __init__(self, logit, groups):
        super().__init__()
        self.sinks, self.num_key_value_groups, self.is_causal = logit, groups, True


@pytest.mark.parametrize("implementation", GATED)
@pytest.mark.parametrize("t, j", [(6, 6), (1, 6), (3, 6), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sink_logit_is_one_more_column_of_the_softmax(implementation, t, j, masked):
    q, k, v, logit = random_attention(t=t, j=j)
    gate = SinkGate(LlamaConfig(**SIZES, gate="sink", gate_sink=0.0)).double()
    gate.logit.data = logit
    reports = []
    gate.report.register_forward_hook(lambda module, args, out: reports.append(out))
    visible = causal(q, k)
    if masked:
        visible = visible & (torch.arange(j) != 0) | (torch.arange(j) == j - 1)
    mask = None if not masked and implementation == "gated_sdpa" else visible
    if implementation == "gated_eager":
        mask = torch.zeros(visible.shape).double().masked_fill(~visible, torch.finfo(torch.float64).min)
    module = Sinks(logit, 2)
    out, w = gated_attention(module, q, k, v, mask, 0.3, (gate, q), attend=GATED[implementation][0])
    key, value = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = (0.3 * q @ key.mT).masked_fill(~visible, -torch.inf)
    column = logit[None, :, None, None].expand(2, -1, t, 1)
    full = torch.cat([logits, column], -1).softmax(-1)
    assert_close(out, (full[..., :-1] @ value).transpose(1, 2))
    assert_close(reports[0], (1 - full[..., -1:]).transpose(1, 2))
    opening = (logits.logsumexp(-1) - logit[:, None]).sigmoid()  # (42.3)
    assert_close(out, (logits.softmax(-1) @ value * opening[..., None]).transpose(1, 2))
    theirs, their_w = gpt_oss_attention(module, q, k, v, torch.zeros(visible.shape).double().masked_fill(~visible, -torch.inf), 0.3)
    assert_close(out, theirs)
    assert (w is None) == (implementation == "gated_sdpa")
    if w is not None:
        assert_close(w, their_w)


@families
def test_sinks_in_a_model_agree_between_the_implementations(name):
    found = []
    for implementation in IMPLEMENTATIONS:
        model = strong(name, "sink", implementation)
        inputs = batch(2, 20, pad=4)
        real = inputs["attention_mask"].bool()
        model(**inputs, labels=inputs["input_ids"].masked_fill(~real, -100)).loss.backward()
        found.append((logits(model, **inputs)[real], [g[real] for g in trace_gates(model, **inputs)], {n: p.grad for n, p in model.named_parameters()}))
    assert_close(*found, atol=1e-4, rtol=1e-3)
    assert all(0 < g.min() and g.max() < 1 for g in found[0][1])


def test_where_a_sink_starts():
    expected, inputs = logits(plain(), **batch()), batch()
    assert_close(logits(convert_gated(plain(), "sink", sink=-40.0), **inputs), expected)
    change = [(logits(convert_gated(plain(), "sink", sink=s), **inputs) - expected).abs().max() for s in (-10.0, -5.0, 0.0)]
    assert change == sorted(change) and change[0] < 0.01 < change[2]
    lonely = trace_gates(convert_gated(plain(), "sink"), input_ids=inputs["input_ids"])[0][:, 0]
    assert (lonely < trace_gates(convert_gated(plain(), "sink", sink=-2.0), input_ids=inputs["input_ids"])[0][:, 0]).all()


# padding, caches, generation


@families
@gates
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_and_the_rest_of_the_batch_change_nothing(name, gate, implementation):
    check_rows_are_independent(strong(name, gate, implementation), batch(3, 12, pad=5))


@families
@gates
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_token_by_token_equals_the_full_pass(name, gate, kind):
    check_token_by_token(strong(name, gate, "sdpa"), kind)


@families
@gates
def test_generation(name, gate):
    check_generation(strong(name, gate, "sdpa"), batch(2, 9, pad=3))


# training, peft, saving, loading


@gates
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(gate, reentrant):
    one, two = strong(gate=gate).train(), strong(gate=gate).train()
    two.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        two.enable_input_require_grads()
    (loss, grads), (loss_again, grads_again) = step(one, **batch()), step(two, **batch())
    assert torch.equal(loss, loss_again)
    assert_close(grads, grads_again, rtol=0, atol=0)


@gates
def test_parameter_groups_give_gates_their_own_rate(gate):
    model = strong(gate=gate)
    groups = parameter_groups(model, lr=1e-4, precision_lr=1e-2, weight_decay=0.1)
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-2, 0.0)]
    assert {id(p) for part in added(model, Gate) for p in part.parameters()} == {id(p) for p in groups[2]["params"]}


@gates
def test_lora_trains_saves_and_loads_the_gates(gate, tmp_path):
    def wrapped():
        torch.manual_seed(0)
        return get_peft_model(convert_gated(plain(), gate), LoraConfig(r=4, target_modules=["q_proj", "o_proj", "gate_proj"], modules_to_save=["gate"]))

    tuned = wrapped().train()
    assert sum("self_attn.gate.modules_to_save" in n for n, p in tuned.named_parameters() if p.requires_grad) == 3
    optimizer = torch.optim.AdamW(parameter_groups(tuned, lr=1e-2, precision_lr=1e-1))
    losses = []
    for _ in range(4):
        loss = tuned(**batch(), labels=batch()["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(convert_gated(plain(), gate), tmp_path).eval()
    assert torch.equal(logits(again, **batch()), logits(tuned.eval(), **batch()))
    assert all(g.std() > 0 for g in trace_gates(again, **batch())) and len(trace_gates(again, **batch())) == 3
    with again.disable_adapter():
        assert_close(logits(again, **batch()), logits(convert_gated(plain(), gate), **batch()))
    assert_close(logits(tuned.merge_and_unload(), **batch()), logits(again, **batch()), atol=1e-4, rtol=1e-4)


@families
@gates
@pytest.mark.parametrize("tied", [False, True])
def test_saving_and_loading(name, gate, tied, tmp_path):
    model = strong(name, gate, "sdpa", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["gate"] == gate
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), GATED_FAMILIES[name].causal_lm.from_pretrained(tmp_path, attn_implementation="gated_sdpa")):
        assert type(loaded) is type(model) is GATED_FAMILIES[name].causal_lm
        assert isinstance(AutoConfig.from_pretrained(tmp_path), GATED_FAMILIES[name].config)
        assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
        assert torch.equal(logits(loaded.eval(), **batch()), logits(model, **batch()))


@families
@gates
def test_a_plain_checkpoint_in_a_gated_class(name, gate, tmp_path):
    model = plain(name)
    model.save_pretrained(tmp_path)
    loaded = GATED_FAMILIES[name].causal_lm.from_pretrained(tmp_path, gate=gate, gate_sink=-3.0, attn_implementation="eager").eval()
    assert_close(dict(loaded.state_dict()), dict(convert_gated(model, gate, sink=-3.0).state_dict()), rtol=0, atol=0)
    assert torch.equal(logits(loaded, **batch()), logits(model, **batch()))
    inner = GATED_FAMILIES[name].model.from_pretrained(tmp_path, gate=gate)
    assert all((p == (0.0 if gate == "sink" else p * 0)).all() for part in added(inner, Gate) for p in part.parameters())


@gates
def test_loaded_in_bfloat16_the_gates_stay_float32_and_nothing_else(gate, tmp_path):
    strong(gate=gate).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {n for n, _ in model.named_parameters() if "self_attn.gate." in n}
    exact = logits(strong(gate=gate), **batch())
    plain_error = (logits(plain().to(torch.bfloat16), **batch()).float() - logits(plain(), **batch())).square().mean().sqrt()
    assert (logits(model, **batch()).float() - exact).square().mean().sqrt() < 4 * plain_error
    with torch.autocast("cpu", torch.bfloat16):
        strong(gate=gate)(**batch(), labels=batch()["input_ids"]).loss.backward()


def test_a_gated_model_from_its_configuration():
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**SIZES, gate="sink", gate_sink=-1.0))
    assert all((part.logit == -1).all() for part in added(model, Gate)) and model.config._attn_implementation == "gated_sdpa"
    step(model, **batch())


def test_attention_weights_are_there_with_the_explicit_attention():
    assert_close(convert_gated(plain(), "headwise")(**batch(), output_attentions=True).attentions, plain()(**batch(), output_attentions=True).attentions, rtol=0, atol=0)
    model = strong(gate="sink")
    for w, g in zip(model(**batch(), output_attentions=True).attentions, trace_gates(model, **batch()), strict=True):
        assert_close(w.sum(-1), g.squeeze(-1).transpose(1, 2))


@families
@gates
def test_pickling(name, gate):
    model = strong(name, gate)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) and torch.equal(logits(again, **batch()), logits(model, **batch()))


def test_what_gates_cost():
    "TinyLlama's configuration, without memory."
    size = dict(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4)
    for gate, each in (("headwise", 32 * 2048), ("elementwise", 2048 * 2048), ("sink", 32)):
        with torch.device("meta"):
            model = GatedLlamaForCausalLM(GatedLlamaConfig(**size, gate=gate))
        assert sum(p.numel() for part in added(model, Gate) for p in part.parameters()) == 22 * each
        assert model.num_parameters() == 1_100_048_384 + 22 * each


# what is refused


def test_other_models_are_refused_by_name():
    with pytest.raises(TypeError, match="convert_gated takes one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM, got LlamaModel"):
        convert_gated(LlamaModel(LlamaConfig(**SIZES)))
    with pytest.raises(TypeError, match="got GatedLlamaForCausalLM"):
        convert_gated(convert_gated(plain()))
    with pytest.raises(TypeError, match="got BFTLlamaForCausalLM"):
        convert_gated(convert(plain()))
    with pytest.raises(TypeError, match="got GatedLlamaForCausalLM"):
        convert(convert_gated(plain()))
    with pytest.raises(TypeError, match="got PeftModel"):
        convert_gated(get_peft_model(plain(), LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("wrong, says", [
    (dict(gate="each"), "gate must be one of 'headwise', 'elementwise', 'sink', got 'each'"),
    (dict(gate="sink", sink=float("-inf")), "gate_sink must be a finite number, got -inf"),
])  # fmt: skip
def test_wrong_settings_are_refused_and_leave_the_model_alone(wrong, says):
    model = plain()
    with pytest.raises(ValueError, match=re.escape(says)):
        convert_gated(model, **wrong)
    with pytest.raises(ValueError, match=re.escape(says)):
        GatedLlamaForCausalLM(GatedLlamaConfig(**SIZES, gate=wrong["gate"], gate_sink=wrong.get("sink", 0.0)))
    assert type(model) is LlamaForCausalLM and model.config._attn_implementation == "eager"


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match=re.escape("LlamaForCausalLM has no gates: use bft_nb.gates.convert_gated(model)")):
        trace_gates(plain(), **batch())
    with pytest.raises(TypeError, match="BFTLlamaForCausalLM has no gates"):
        trace_gates(convert(plain()), **batch())
    with pytest.raises(TypeError, match="GatedLlamaForCausalLM has no filtering layers"):
        trace(convert_gated(plain()), **batch())
    model = convert_gated(plain())
    model.set_attn_implementation("sdpa")  # would leave the gate out
    with pytest.raises(ValueError, match="attn_implementation must be one of 'gated_eager', 'gated_sdpa', got 'sdpa'"):
        model(**batch())
    other = plain()
    other.set_attn_implementation("gated_sdpa")
    with pytest.raises(ValueError, match="LlamaAttention asked for gated attention, but has no gate"):
        other(**batch())
    flex = plain()
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="must be one of 'gated_eager', 'gated_sdpa', got 'gated_flex_attention'"):
        convert_gated(flex)
