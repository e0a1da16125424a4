"""Hidden states with transformers: one forward of the decoder without its head, three captured layers and the last state."""

import torch
from clock import repeat
from transformers import AutoConfig, AutoModel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def captured_layers(layers):
    """speculators' default: the states that enter these layers."""
    return [2, layers // 2, layers - 3]


class Verifier:
    """A verifier as transformers runs it."""

    def __init__(self, folder, dtype, attention="sdpa", device="cpu"):
        self.config = AutoConfig.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation=attention)
        self.model = self.model.eval().to(device)
        self.layers = captured_layers(self.config.num_hidden_layers)
        # transformers returns the last state after the final norm; a draft is trained on what enters it.
        self.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _, arguments):
        self.last = arguments[0]

    @torch.inference_mode()
    def states(self, token_ids):
        """[D, T] token ids: [D, T, 4, H], the captured states and the last."""
        hidden = self.model(token_ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.stack([*(hidden[layer] for layer in self.layers), self.last], dim=2)


def prepare(case):
    verifier = Verifier(case["verifier"], case["dtype"], case["attention"], case["device"])
    generator = torch.Generator().manual_seed(0)
    tokens, documents = case["tokens"], case["documents"]
    token_ids = torch.randint(0, verifier.config.vocab_size, (tokens,), generator=generator).to(case["device"])
    if case["together"]:
        parts = [token_ids.reshape(documents, -1)]
    else:
        starts = [tokens * document // documents for document in range(documents + 1)]
        parts = [token_ids[None, start:end] for start, end in zip(starts, starts[1:])]

    def forward():
        for part in parts:
            # States are handed on from the host's memory, as eaglet does.
            verifier.states(part).to("cpu", torch.bfloat16)

    forward()
    return lambda: {**repeat(forward, case["repeats"], case["device"]), "tokens": tokens}
