"""speculators' own EAGLE-3 step: their model, loss and optimizer as their trainer calls them.

Forward over all TTT steps, backward, clipping to norm 1, AdamW. Weights are f32; bf16 is autocast around the forward pass and
bf16 hidden states, which is what their trainer does. Their fused losses need a GPU; on a CPU the loss is their eager one.
"""

import torch
from clock import repeat
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from transformers import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

AUX_LAYERS = 3


def draft(case):
    """A draft with random weights; the shapes are the case's."""
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[case["layer"]](
        vocab_size=case["vocab"],
        hidden_size=case["hidden"],
        intermediate_size=case["intermediate"],
        num_hidden_layers=1,
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        max_position_embeddings=max(8192, case["tokens"]),
        layer_types=["full_attention"],
        tie_word_embeddings=False,
    )
    layer._attn_implementation = case["attention"]
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=case["draft_vocab"],
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=list(range(AUX_LAYERS)),
        )
    )
    with torch.no_grad():
        # Left NaN for weights of the verifier, which there is none of here.
        for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            frozen.weight.normal_(std=0.02)
        if model.use_draft_vocab:
            model.t2d[: case["draft_vocab"]] = True
    return model.train()


def batch(case, dtype):
    """One packed row: all positions count, documents of (nearly) equal length."""
    tokens, hidden, documents = case["tokens"], case["hidden"], case["documents"]
    starts = torch.tensor([tokens * document // documents for document in range(documents)])
    places = torch.arange(tokens)
    document_ids = torch.searchsorted(starts, places, right=True) - 1
    return {
        "hidden_states": torch.randn(1, tokens, AUX_LAYERS * hidden).to(dtype),
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden).to(dtype),
        "input_ids": torch.randint(0, case["vocab"], (1, tokens)),
        "loss_mask": torch.ones(1, tokens, dtype=torch.bool),
        "document_ids": document_ids[None],
        "position_ids": (1 + places - starts[document_ids])[None],
    }


def prepare(case):
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[case["dtype"]]
    device = case["device"]
    model = draft(case).to(device)
    (optimizer,) = build_optimizers(model, TrainerConfig(lr=1e-3, num_epochs=1, save_path="", optimizer="adamw"))
    forward = torch.compile(model) if case["compile"] else model
    row = {name: values.to(device) for name, values in batch(case, dtype).items()}
    loss_config = resolve_loss_config("kl_div", "eager" if device == "cpu" else "fused")
    losses = []

    def step():
        with torch.autocast(device.split(":")[0], dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = forward(**row, ttt_steps=case["ttt_steps"], ttt_step_loss_decay=1.0, loss_config=loss_config)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    for _ in range(2):  # moments are allocated in the first; torch.compile compiles again when gradients exist
        step()
    parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)

    def measure():
        del losses[:]
        times = repeat(step, case["repeats"], device)
        if not all(map(torch.isfinite, map(torch.tensor, losses))):
            raise RuntimeError(f"losses are not finite: {losses}")
        return {**times, "tokens": case["tokens"], "trained_parameters": parameters, "loss": losses[-1]}

    return measure
