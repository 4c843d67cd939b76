"A gated language model: the plain one at the start, the closed form away from it, and whole in every use."

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from test_llama import SIZES, batch, families, logits, plain, step
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, StaticCache
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from bft_nb.gates import GATED_FAMILIES, GATES, Gate, GatedLlamaConfig, GatedLlamaForCausalLM, QueryGate, causal, convert_gated, trace_gates
from bft_nb.llama import added, convert, layer_filters, parameter_groups, trace

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
