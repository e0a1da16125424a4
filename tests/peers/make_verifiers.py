"""Makes tests/golden/verifiers: tiny random models of every family, and what transformers computes for them.

    python -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python tests/peers/make_verifiers.py tests/golden/verifiers

Per model: config.json, model.safetensors, and golden.safetensors with, for two sequences `a` and `b`, token ids, the
residual stream entering each layer and leaving the last (`hidden.0` .. `hidden.n`, the last before the final norm), its
norm and the logits; all in f32 on a CPU. The packed forms are quantised here and computed with the unpacked weights.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
LATENT = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    routed_scaling_factor=2.5,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=50000.0, factor=8.0, mscale=1.0, mscale_all_dim=0.8,
        beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=32,
    ),
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

# Folder: (model_type, what differs from SIZES).
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", dict(tie_word_embeddings=True)),
    "llama3_rope": ("llama", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(sliding_window=8)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "smollm3_nope": ("smollm3", dict(no_rope_layers=[1, 0, 1], tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(head_dim=None)),
    "qwen3": ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, mlp_only_layers=[1], norm_topk_prob=True),
    ),
    "phi3_partial": (
        "phi3",
        dict(
            head_dim=None, num_attention_heads=2, num_key_value_heads=1,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75),
        ),
    ),
    "gemma": ("gemma", dict(hidden_activation="gelu_pytorch_tanh")),
    "gemma2": (
        "gemma2",
        dict(sliding_window=8, query_pre_attn_scalar=12, attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            sliding_window=8, query_pre_attn_scalar=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(
            num_local_experts=4, num_experts_per_tok=2, sliding_window=8, hidden_act="silu",
            rope_parameters=dict(
                rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    "deepseek_v3": ("deepseek_v3", dict(n_group=4, topk_group=2, **LATENT)),
    "deepseek_no_query_latent": ("deepseek_v3", dict(LATENT, n_group=1, topk_group=1, q_lora_rank=None)),
    "kimi_k25_int4": ("deepseek_v3", dict(n_group=1, topk_group=1, **LATENT)),
    "deepseek_fp8": ("deepseek_v3", dict(n_group=1, topk_group=1, **LATENT)),
    "gpt_oss_mxfp4": (
        "gpt_oss",
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, hidden_act="silu", intermediate_size=32),
    ),
}
FP8_BLOCK = 24
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def randomise(model, seed):
    """Weights large enough that nothing is washed out; norms around their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" in name or "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name and value.dim() == 1:
                value.copy_(value + 0.2 * noise)
            else:
                value.copy_((0.25 if value.dim() > 1 else 0.5) * noise)


def pack_int4(weight, group=32):
    """compressed-tensors' pack-quantized: what is stored, and the weight that it stands for."""
    rows, cols = weight.shape
    groups = weight.reshape(rows, -1, min(group, cols))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16)
    codes = torch.clamp(torch.round(groups / scale.float()), -8, 7).to(torch.int64)
    unpacked = (codes.float() * scale.float()).reshape(rows, cols)
    nibbles = (codes.reshape(rows, -1, 8) + 8) << (4 * torch.arange(8))
    words = nibbles.sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    stored = {
        "weight_packed": words,
        "weight_scale": scale.squeeze(-1).contiguous(),
        "weight_shape": torch.tensor([rows, cols]),
    }
    return stored, unpacked


def pack_fp8(weight, block=FP8_BLOCK):
    """DeepSeek's E4M3 with a scale per block."""
    rows, cols = weight.shape
    scales = torch.empty(-(-rows // block), -(-cols // block))
    stored, unpacked = torch.empty(rows, cols, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max() / 448.0
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            unpacked[part] = stored[part].float() * scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, unpacked


def pack_mxfp4(weight):
    """OCP MXFP4 along the last dimension of `[experts, outputs, inputs]`."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True) / 6.0)).clamp(-100, 100) + 1
    scaled = groups / 2.0**exponent
    codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    unpacked = FP4[codes] * scaled.sign() * 2.0**exponent
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponent.squeeze(-1) + 127).to(torch.uint8), unpacked.reshape(weight.shape)


def quantise(folder, name, model, config):
    """Replaces stored tensors by their packed form, and the model's weights by what these stand for."""
    file = folder / "model.safetensors"
    stored, packed = load_file(file), {}
    state = model.state_dict()
    fused = {key for key in state if key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    with torch.no_grad():
        for key, value in stored.items():
            expert = ".mlp.experts." in key
            projection = key.endswith("_proj.weight") or key.endswith("mqa.weight")
            if name == "kimi_k25_int4" and expert or name == "deepseek_fp8" and projection:
                parts, unpacked = (pack_int4 if "int4" in name else pack_fp8)(value)
                packed |= {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
                stored[key] = unpacked
                if key in state:
                    state[key].copy_(unpacked)
            elif name == "gpt_oss_mxfp4" and key in fused:
                blocks, scales, unpacked = pack_mxfp4(value.transpose(1, 2))
                packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
                state[key].copy_(unpacked.transpose(1, 2))
            else:
                packed[key] = value
        if name != "gpt_oss_mxfp4":
            # transformers holds all experts of a layer in one tensor.
            for key in fused:
                base, part = key.rsplit(".", 1)
                parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
                for expert in range(state[key].shape[0]):
                    halves = [stored[f"{base}.{expert}.{half}.weight"] for half in parts]
                    state[key][expert].copy_(torch.cat(halves))
    if name == "kimi_k25_int4":
        packed = {f"language_model.{key}": value for key, value in packed.items()}
        scheme = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, dynamic=False)
        config["model_type"] = "kimi_k2"
        config["quantization_config"] = dict(
            quant_method="compressed-tensors", format="pack-quantized",
            config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(scheme, actorder=None))),
        )
        config = dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=config)
    elif name == "deepseek_fp8":
        config["quantization_config"] = dict(
            quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[FP8_BLOCK, FP8_BLOCK]
        )
    else:
        config["quantization_config"] = dict(quant_method="mxfp4")
    save_file({key: value.contiguous() for key, value in packed.items()}, file)
    return config


def golden(model, vocab):
    """What the model computes for two sequences."""
    generator = torch.Generator().manual_seed(7)
    result = {}
    for sequence, length in (("a", 23), ("b", 11)):
        ids = torch.randint(0, vocab, (1, length), generator=generator)
        entering, leaving = [], []
        decoder = model.model
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: entering.append((args[0] if args else kwargs["hidden_states"]).clone()),
                with_kwargs=True,
            )
            for layer in decoder.layers
        ]
        hooks.append(decoder.norm.register_forward_pre_hook(lambda _, args: leaving.append(args[0].clone())))
        hooks.append(decoder.norm.register_forward_hook(lambda _, __, out: leaving.append(out.clone())))
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        result[f"{sequence}.token_ids"] = ids[0]
        for index, state in enumerate([*entering, leaving[0]]):
            result[f"{sequence}.hidden.{index}"] = state[0].float().contiguous()
        result[f"{sequence}.normed"] = leaving[1][0].float().contiguous()
        result[f"{sequence}.logits"] = logits[0].float().contiguous()
    return result


def main():
    root = Path(sys.argv[1])
    logging.disable_progress_bar()
    only = set(sys.argv[2:])
    for seed, (name, (model_type, differences)) in enumerate(MODELS.items()):
        if only and name not in only:
            continue
        sizes = {**SIZES, **differences}
        if sizes["head_dim"] is None:
            del sizes["head_dim"]
        config = CONFIG_MAPPING[model_type](**sizes)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomise(model, seed)
        folder = root / name
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        if name in ("kimi_k25_int4", "deepseek_fp8", "gpt_oss_mxfp4"):
            saved = quantise(folder, name, model, saved)
        saved.pop("transformers_version", None)
        (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)
        save_file(golden(model, config.vocab_size), folder / "golden.safetensors")
        print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()
