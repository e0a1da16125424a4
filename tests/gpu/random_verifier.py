"""A verifier of SmolLM2-135M's shapes with random weights, for machines that cannot download one.

    python tests/gpu/random_verifier.py FOLDER

Weights are bf16 of magnitudes between 2^-6 and 2^-5, norms are 1: states stay finite, and take as long as real ones. Needs
nothing but Python.
"""

import json
import random
import struct
import sys
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def shapes():
    """Names and shapes of all tensors."""
    hidden, inner, keys = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_key_value_heads"] * 64
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows in [("q", hidden), ("k", keys), ("v", keys), ("o", hidden)]:
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)


def values(shape):
    """Bytes of a tensor."""
    count = 1
    for side in shape:
        count *= side
    if len(shape) == 1:
        return struct.pack("<H", 0x3F80) * count
    mask = int.from_bytes(struct.pack("<H", 0x80FF) * count, "little")
    exponent = int.from_bytes(struct.pack("<H", 0x3C80) * count, "little")
    noise = int.from_bytes(random.randbytes(2 * count), "little")
    return (noise & mask | exponent).to_bytes(2 * count, "little")


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    random.seed(0)
    header, end = {}, 0
    for name, shape in shapes():
        length = 2
        for side in shape:
            length *= side
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shapes():
            out.write(values(shape))


if __name__ == "__main__":
    main()
