#!/usr/bin/env python3
"""Writes what transformers computes from a GGUF file, for runtime/tests/gguf/models.rs to compare with.

    pip install torch transformers accelerate gguf safetensors
    python gguf_logits.py DIR/models/gemma-3-270m-q4_k_m.gguf ...

Beside each FILE.gguf comes FILE.peer.safetensors: `token_ids` int64 [T], some `positions` int64 [P] and their `logits` f32
[P, V]. transformers unpacks the blocks to f32 with gguf-py and computes in f32.
"""

import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

TOKENS = 600  # more than the window of Gemma 3 270M


def main():
    for path in sys.argv[1:]:
        folder, name = os.path.split(os.path.abspath(path))
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
        )
        random = torch.Generator().manual_seed(1)
        token_ids = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=random)
        with torch.no_grad():
            logits = model(token_ids[None]).logits[0]
        # Every tenth position: the vocabulary is large.
        kept = torch.arange(9, TOKENS, 10)
        values = {"token_ids": token_ids, "positions": kept, "logits": logits[kept].contiguous()}
        save_file(values, os.path.join(folder, name.removesuffix(".gguf") + ".peer.safetensors"))


if __name__ == "__main__":
    main()
