"""Small random models with Tilewright's attention, against the same models in float64.

The reference is a dense attention written out below, in a float64 model, with every mask spelled
out. The error allowed is twice what the model's own eager attention makes in the model's own type,
and a floor of a few roundings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", exc_type=ModuleNotFoundError)

import transformers

from tilewright.integrations import transformers as integration

pytestmark = pytest.mark.L0

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, max_position_embeddings=64)
    return transformers.BertForMaskedLM._from_config(config)


def modernbert() -> Any:
    config = transformers.ModernBertConfig(
        **SMALL,
        local_attention=6,
        max_position_embeddings=64,
        layer_types=["full_attention", "sliding_attention"],
    )
    return transformers.ModernBertForMaskedLM._from_config(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    )
    return transformers.GPT2LMHeadModel._from_config(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**GROUPED))


def qwen2() -> Any:
    config = transformers.Qwen2Config(
        **GROUPED,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    return transformers.Qwen2ForCausalLM._from_config(config)


def mistral() -> Any:
    config = transformers.MistralConfig(**GROUPED, sliding_window=4)
    return transformers.MistralForCausalLM._from_config(config)


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        **GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        # Low enough to bend the scores of a small model.
        attn_logit_softcapping=0.5,
    )
    return transformers.Gemma2ForCausalLM._from_config(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **GROUPED,
        head_dim=8,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.GptOssForCausalLM._from_config(config)
    model.set_experts_implementation("eager")
    return model


def deepseek() -> Any:
    # Keys of 12 elements, values of 8.
    config = transformers.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
    )
    return transformers.DeepseekV3ForCausalLM._from_config(config)


DECODERS = [gpt2, llama, qwen2, mistral, gemma2, gpt_oss, deepseek]
MODELS = [bert, modernbert, *DECODERS]
TYPES = [torch.float32, torch.bfloat16]


REFERENCE = "float64_reference"


def reference_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in float64, one matrix of scores a head; a row that sees nothing gives 0."""
    assert query.dtype is torch.float64 and attention_mask.dtype is torch.bool
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    weights = torch.where(attention_mask, scores.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp().view(1, -1, 1, 1)
    weights = weights / total.where(total > 0, 1.0)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value), None


def reference_mask(**arguments: Any) -> torch.Tensor:
    """The whole mask, always."""
    spelled_out = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return transformers.masking_utils.sdpa_mask(**{**arguments, **spelled_out})


@dataclasses.dataclass(frozen=True)
class Batch:
    """Token ids (2, S) and their padding mask (2, S) or None."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None

    @property
    def real(self) -> torch.Tensor:
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()


def make_batch(padding: str, length: int = 13) -> Batch:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    if padding == "none":
        return Batch(ids, None)
    mask = torch.ones_like(ids)
    hidden = slice(0, 5) if padding == "left" else slice(length - 5, None)
    mask[1, hidden] = 0
    return Batch(ids.where(mask == 1, torch.zeros_like(ids)), mask)


def make_model(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    """The model with its weights drawn large enough for attention to be far from uniform."""
    integration.register()
    transformers.AttentionInterface.register(REFERENCE, reference_attention)
    transformers.AttentionMaskInterface.register(REFERENCE, reference_mask)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = build()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or "sinks" in name:
                    parameter.normal_(0.0, 0.3, generator=generator)
                elif "norm" in name.lower() or "ln_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(dtype).eval()


def logits(model: Any, implementation: str, batch: Batch, **more: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **more)
    return out.logits[batch.real].double()


def gradients(model: Any, implementation: str, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(3)
    out = logits(model, implementation, batch)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * weights).mean().backward()
    return {
        name: parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check_error(
    found: torch.Tensor,
    plain: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype,
    scale: float | None = None,
) -> None:
    """Require an error of at most twice the plain one, and a floor of eight roundings.

    ``scale`` is the size of what was rounded: by default that of the reference.
    """
    assert torch.isfinite(found).all()
    scale = reference.abs().max().item() if scale is None else scale
    floor = 8 * torch.finfo(dtype).eps * scale
    allowed = 2 * (plain - reference).abs().max().item() + floor
    error = (found - reference).abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@torch.no_grad()
def test_logits(build: Callable[[], Any], padding: str, dtype: torch.dtype) -> None:
    batch = make_batch(padding)
    model = make_model(build, dtype)
    plain = logits(model, "eager", batch)
    found = logits(model, integration.NAME, batch)
    reference = logits(model.double(), REFERENCE, batch)
    assert reference.std() > 0.1
    check_error(found, plain, reference, dtype)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_gradients(build: Callable[[], Any], padding: str) -> None:
    batch = make_batch(padding)
    model = make_model(build, torch.float32)
    plain = gradients(model, "eager", batch)
    found = gradients(model, integration.NAME, batch)
    reference = gradients(model.double(), REFERENCE, batch)
    assert found.keys() == reference.keys()
    assert len(found) > 10
    # A bias of the keys has a gradient of 0, as the difference of numbers of this size.
    scale = max(gradient.abs().max().item() for gradient in reference.values())
    for name, gradient in found.items():
        check_error(gradient, plain[name], reference[name], torch.float32, scale)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("build", DECODERS, ids=lambda build: build.__name__)
@torch.no_grad()
def test_cached_steps_equal_one_pass(build: Callable[[], Any], cache: str, padding: str) -> None:
    """A prompt, then three tokens at once, then single ones, beyond the sliding window."""
    batch = make_batch(padding, length=14)
    model = make_model(build, torch.float32)
    plain = logits(model, "eager", batch)
    model.set_attn_implementation(integration.NAME)
    if cache == "static":
        kept = transformers.StaticCache(config=model.config, max_cache_len=20)
    else:
        kept = transformers.DynamicCache(config=model.config)
    rows = []
    done = 0
    for count in (8, 3, 1, 1, 1):
        end = done + count
        mask = None if batch.attention_mask is None else batch.attention_mask[:, :end]
        out = model(
            input_ids=batch.input_ids[:, done:end],
            attention_mask=mask,
            cache=kept,
            use_cache=True,
            **positions(model, batch, done, end),
        )
        rows.append(out.logits)
        done = end
    found = torch.cat(rows, dim=1)[batch.real].double()
    reference = logits(model.double(), REFERENCE, batch)
    check_error(found, plain, reference, torch.float32)


def positions(model: Any, batch: Batch, start: int, end: int) -> dict[str, torch.Tensor]:
    """The same positions that one pass over the whole batch gives its tokens."""
    return {"position_ids": torch.arange(start, end).expand(batch.input_ids.shape[0], -1)}


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("build", [llama, gemma2], ids=lambda build: build.__name__)
@torch.no_grad()
def test_generation_gives_the_same_tokens(
    build: Callable[[], Any], cache_implementation: str | None
) -> None:
    batch = make_batch("left", length=9)
    model = make_model(build, torch.float32)
    made = {}
    for implementation in ("eager", integration.NAME):
        model.set_attn_implementation(implementation)
        made[implementation] = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            cache_implementation=cache_implementation,
            disable_compile=True,
        )
    assert made["eager"].shape == (2, 17)
    assert torch.equal(made["eager"], made[integration.NAME])


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration._from_config(config)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_an_encoder_and_a_decoder_with_a_position_bias(padding: str) -> None:
    batch = make_batch(padding)
    targets = make_batch("none", length=7).input_ids
    model = make_model(t5, torch.float32)
    found = {}
    for implementation in ("eager", integration.NAME, REFERENCE):
        if implementation == REFERENCE:
            model.double()
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation(implementation)
        out = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            decoder_input_ids=targets,
        ).logits
        out.double().square().mean().backward()
        table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        found[implementation] = (out.detach().double(), table.grad.double().clone())
    for index in range(2):
        ours, plain, reference = (
            found[name][index] for name in (integration.NAME, "eager", REFERENCE)
        )
        check_error(ours, plain, reference, torch.float32)


@torch.no_grad()
def test_a_decoder_that_is_told_not_to_be_causal() -> None:
    batch = make_batch("right")
    model = make_model(llama, torch.float32)
    causal = logits(model, integration.NAME, batch)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    plain = logits(model, "eager", batch)
    found = logits(model, integration.NAME, batch)
    reference = logits(model.double(), REFERENCE, batch)
    check_error(found, plain, reference, torch.float32)
    assert (found - causal).abs().max() > 0.1


@pytest.mark.parametrize("additive", [False, True])
@torch.no_grad()
def test_a_custom_mask_of_four_axes(additive: bool) -> None:
    batch = make_batch("none")
    length = batch.input_ids.shape[1]
    generator = torch.Generator().manual_seed(5)
    may = torch.rand(2, 1, length, length, generator=generator) > 0.5
    may |= torch.eye(length, dtype=torch.bool)
    model = make_model(llama, torch.float32)
    hidden = torch.finfo(torch.float32).min
    added = torch.zeros(may.shape).masked_fill(~may, hidden)
    outs = {}
    for implementation, mask in (("eager", added), (integration.NAME, added if additive else may)):
        model.set_attn_implementation(implementation)
        outs[implementation] = model(input_ids=batch.input_ids, attention_mask=mask).logits
    torch.testing.assert_close(outs[integration.NAME], outs["eager"], atol=2e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_one_another() -> None:
    """Several sequences in one row, told apart by their positions alone."""
    model = make_model(llama, torch.float32)
    model.set_attn_implementation(integration.NAME)
    batch = make_batch("none")
    ids = batch.input_ids[:1]
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        first = model(input_ids=ids[:, :5], use_cache=False).logits
        second = model(input_ids=ids[:, 5:], use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat([first, second], 1), atol=2e-5, rtol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    batch = make_batch("right")
    model = make_model(llama, torch.float32)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        still = logits(model, integration.NAME, batch)
        assert torch.equal(logits(model, integration.NAME, batch), still)
        model.train()
        torch.manual_seed(1)
        one = logits(model, integration.NAME, batch)
        two = logits(model, integration.NAME, batch)
        torch.manual_seed(1)
        again = logits(model, integration.NAME, batch)
    assert (one - two).abs().max() > 0.05
    assert (one - still).abs().max() > 0.05
    assert torch.equal(one, again)
