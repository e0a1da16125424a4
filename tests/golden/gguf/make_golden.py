#!/usr/bin/env python3
"""Makes the files of this folder with the reference implementations: gguf-py 0.19 and SentencePiece 0.2.

    pip install numpy gguf==0.19.0 sentencepiece==0.2.3 safetensors
    python make_golden.py

blocks.gguf          per block format a tensor of random blocks, and what gguf-py dequantises it to
tiny/                a random Llama as safetensors and, in llama.cpp's order of rows, as GGUF
sentencepiece.gguf   a small SentencePiece BPE tokenizer; sentencepiece.json has what SentencePiece encodes with it
split-*.gguf         three tensors in two files
"""

import json
import os
import tempfile

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where a block has half-precision scales, in bytes from its start.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}


def random_blocks(random, name, rows, row_elements):
    """Random integers with scales that are ordinary numbers, and the extreme integers in the first blocks."""
    elements, size = gguf.GGML_QUANT_SIZES[Type[name]]
    blocks = random.integers(0, 256, (rows * row_elements // elements, size), dtype=np.uint8)
    blocks[0, :] = 0
    blocks[1, :] = 255
    for at in HALVES[name]:
        scales = random.normal(0, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def make_blocks():
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(os.path.join(HERE, "blocks.gguf"), "blocks")
    tensors = []
    for name in FORMATS:
        # Rows of three blocks; two for the long ones.
        row = 96 if gguf.GGML_QUANT_SIZES[Type[name]][0] == 32 else 512
        blocks = random_blocks(random, name, 5 if row == 96 else 2, row)
        tensors.append((name, blocks, Type[name]))
        tensors.append((f"{name}.f32", gguf.dequantize(blocks, Type[name]).astype(np.float32), None))
    values = random.normal(0, 1, (3, 8)).astype(np.float32)
    tensors.append(("F16", values.astype(np.float16), None))
    tensors.append(("F16.f32", values.astype(np.float16).astype(np.float32), None))
    bf16 = gguf.quantize(values, Type.BF16)
    tensors.append(("BF16", bf16, Type.BF16))
    tensors.append(("BF16.f32", gguf.dequantize(bf16, Type.BF16), None))
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)


def make_split():
    random = np.random.default_rng(2)
    for number in range(2):
        writer = gguf.GGUFWriter(os.path.join(HERE, f"split-{number + 1:05}-of-00002.gguf"), "llama")
        if number == 0:
            writer.add_uint32("llama.attention.head_count", 2)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 3)
        for name in (["token_embd.weight"], ["blk.0.attn_q.weight", "output_norm.weight"])[number]:
            writer.add_tensor(name, random.normal(0, 1, (8, 4)).astype(np.float32))
        finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weights, heads):
    """The order of rows in which llama.cpp's converter stores queries and keys of Llama."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def make_tiny():
    random = np.random.default_rng(3)
    hidden, inner, layers, heads, kv_heads, head_dim, vocab = 32, 64, 3, 4, 2, 12, 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    folder = os.path.join(HERE, "tiny")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
        file.write("\n")

    def matrix(*shape):
        return random.normal(0, 0.2, shape).astype(np.float32)

    def norm(width):
        return (1 + random.normal(0, 0.1, width)).astype(np.float32)

    # (Hugging Face's name, GGUF's name, values, heads of rows that are interleaved)
    tensors = [
        ("model.embed_tokens", "token_embd", matrix(vocab, hidden), 0),
        ("lm_head", "output", matrix(vocab, hidden), 0),
        ("model.norm", "output_norm", norm(hidden), 0),
    ]
    for layer in range(layers):
        for theirs, ours, values, rows in [
            ("input_layernorm", "attn_norm", norm(hidden), 0),
            ("self_attn.q_proj", "attn_q", matrix(heads * head_dim, hidden), heads),
            ("self_attn.k_proj", "attn_k", matrix(kv_heads * head_dim, hidden), kv_heads),
            ("self_attn.v_proj", "attn_v", matrix(kv_heads * head_dim, hidden), 0),
            ("self_attn.o_proj", "attn_output", matrix(hidden, heads * head_dim), 0),
            ("post_attention_layernorm", "ffn_norm", norm(hidden), 0),
            ("mlp.gate_proj", "ffn_gate", matrix(inner, hidden), 0),
            ("mlp.up_proj", "ffn_up", matrix(inner, hidden), 0),
            ("mlp.down_proj", "ffn_down", matrix(hidden, inner), 0),
        ]:
            tensors.append((f"model.layers.{layer}.{theirs}", f"blk.{layer}.{ours}", values, rows))
    save_file({f"{name}.weight": values for name, _, values, _ in tensors}, os.path.join(folder, "model.safetensors"))

    writer = gguf.GGUFWriter(os.path.join(folder, "model.gguf"), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocab)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    scaling = config["rope_scaling"]
    wave = 2 * np.pi * 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    periods = scaling["original_max_position_embeddings"] / wave
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = (periods - low) / (high - low)
    factors = np.where(periods > high, 1, np.where(periods < low, factor, 1 / ((1 - smooth) / factor + smooth)))
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for _, name, values, rows in tensors:
        writer.add_tensor(f"{name}.weight", interleaved(values, rows) if rows else values)
    finish(writer)


TEXTS = [
    "", " ", "  ", "hello", " hello world", "the quick brown fox\njumps over  the lazy dog",
    "naïve café, Zürich — 北京 и Москва", "🙂👩‍👩‍👧 family", "tabs\tand\r\nline ends\n\n\n", "1234567890 3.14159",
    "ab" * 30, "aaaaaaaaaaaaaaaaa", "\u2581under", "e\u0301 combining", "\u0000 zero", "x" * 200, "don't can't won't I'm",
    "    indented\n        code();", "مرحبا بالعالم", "ไม่มีเว้นวรรค", "trailing   ",
]


def make_sentencepiece():
    lines = ["the quick brown fox jumps over the lazy dog", "hello world, this is a small corpus of text"] * 20
    lines += [f"number {n} and {n * 7919 % 1000} of the lines, in code: x = {n};" for n in range(300)]
    lines += ["naive cafe in Zurich, don't you think? I'm sure they can't; we won't."] * 20
    with tempfile.TemporaryDirectory() as folder:
        corpus, prefix = os.path.join(folder, "corpus"), os.path.join(folder, "model")
        with open(corpus, "w") as file:
            file.write("\n".join(lines))
        # Llama 2's options.
        sentencepiece.SentencePieceTrainer.train(
            input=corpus, model_prefix=prefix, vocab_size=500, model_type="bpe", byte_fallback=True, split_digits=True,
            normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, character_coverage=0.9999, minloglevel=2,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    pieces, scores, kinds = [], [], []
    for index in range(model.vocab_size()):
        pieces.append(model.id_to_piece(index))
        scores.append(model.get_score(index))
        kinds.append(
            2 if model.is_unknown(index) else 3 if model.is_control(index) else 6 if model.is_byte(index) else 1
        )
    writer = gguf.GGUFWriter(os.path.join(HERE, "sentencepiece.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    writer.add_chat_template("{% for message in messages %}{{ bos_token + message.content + eos_token }}{% endfor %}")
    finish(writer)
    cases = [{"text": text, "ids": model.encode(text)} for text in TEXTS]
    with open(os.path.join(HERE, "sentencepiece.json"), "w") as file:
        json.dump(cases, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    make_blocks()
    make_split()
    make_tiny()
    make_sentencepiece()
