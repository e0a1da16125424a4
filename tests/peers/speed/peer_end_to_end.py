"""The peers' two commands: all hidden states to files, then training from these files for one pass.

`extract` writes what `speculators prepare-data` and their offline generation leave in a folder: a dataset of token ids and loss
masks, token counts, and `hidden_states/hs_*.safetensors`; transformers computes the states. `train` is their trainer with their
dataset, packing and checkpoint at the end. Their trainer takes it for granted that there is a GPU: device and autocast are set
to the CPU here, and nothing else is changed.
"""

import gc
import resource
from pathlib import Path
from time import perf_counter, process_time

import torch


def extract(case):
    from chats import rows
    from datasets import Dataset
    from peer_extract import Verifier
    from safetensors.torch import save_file
    from speculators.train.vocab_mapping import save_token_frequency_distribution
    from transformers import AutoTokenizer

    def run():
        folder = Path(case["folder"])
        samples = rows(
            AutoTokenizer.from_pretrained(case["verifier"]), case["samples"], case["tokens_per_row"], case["tokens"]
        )
        dataset = Dataset.from_list(samples).with_format("torch")
        dataset.save_to_disk(folder)
        save_token_frequency_distribution(dataset, folder / "token_freq.pt")
        verifier = Verifier(case["verifier"], case["dtype"])
        (folder / "hidden_states").mkdir()
        written = 0
        for index, sample in enumerate(samples):
            token_ids = torch.tensor(sample["input_ids"])
            states = {"hidden_states": verifier.states(token_ids[None])[0].bfloat16(), "token_ids": token_ids}
            save_file(states, folder / "hidden_states" / f"hs_{index}.safetensors")
            written += states["hidden_states"].nbytes
        return {"tokens": sum(sample["seq_len"] for sample in samples), "rows": len(samples), "written_bytes": written}

    return run


def train(case):
    from peer_extract import captured_layers
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader
    from speculators.train.trainer import Trainer, TrainerConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    class CpuTrainer(Trainer):
        def setup_trainer(self):
            super().setup_trainer()
            self.local_rank, self.device_type = "cpu", "cpu"
            self.model.to("cpu")

        def train_epoch(self, epoch, **options):
            # Step times are only logged, and taking them asks for a GPU.
            self.global_step = max(self.global_step, 1)
            super().train_epoch(epoch, **options)

    def run():
        folder, dtype = Path(case["folder"]), {"f32": torch.float32, "bf16": torch.bfloat16}[case["dtype"]]
        layer = create_transformer_layer_config(
            verifier_name_or_path=case["verifier"],
            num_layers=1,
            draft_arch="llama",
            hidden_act=None,
            sliding_window=2048,
            full_attention_indices=[],
        )
        counts = torch.load(folder / "token_freq.pt", weights_only=True)
        d2t, t2d = build_vocab_mappings_from_distribution(counts, case["draft_vocab"], layer.vocab_size)
        options = dict(loss_fn="kl_div", loss_implementation="eager", ttt_steps=case["ttt_steps"], ttt_step_loss_decay=1.0)
        model = Eagle3DraftModel.from_training_args(
            verifier_config=layer,
            t2d=t2d,
            d2t=d2t,
            draft_vocab_size=case["draft_vocab"],
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            verifier_name_or_path=case["verifier"],
            target_layer_ids=captured_layers(case["verifier_layers"]),
            draft_attn_impl=case["attention"],
            **options,
        )
        dataset = ArrowDataset(
            max_len=case["tokens_per_row"], datapath=folder, on_missing="raise", hidden_states_dtype=dtype
        )
        loader = _setup_dataloader(
            dataset,
            case["tokens_per_row"],
            layer.hidden_size,
            num_workers=case["workers"],
            preprocess=shift_batch,
        )
        call, _ = Eagle3DraftModel.get_trainer_kwargs(**options)
        config = TrainerConfig(
            lr=case["learning_rate"],
            num_epochs=1,
            save_path=str(folder / "checkpoints"),
            train_call_kwargs=call,
            hidden_states_dtype=dtype,
            log_freq=1 << 30,
        )
        trainer = CpuTrainer(model, config, loader)
        trainer.run_training()
        return {"steps": len(loader), "tokens": sum(dataset.approx_lengths)}

    return run


def prepare(case):
    if case["stage"] == "train":
        from transformers import AutoConfig

        case["verifier_layers"] = AutoConfig.from_pretrained(case["verifier"]).num_hidden_layers
    run = {"extract": extract, "train": train}[case["stage"]](case)

    def measure():
        start, cpu = perf_counter(), process_time()
        values = run()
        seconds = perf_counter() - start
        gc.collect()  # ends the processes that loaded files; their CPU seconds count from then on
        loaders = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {**values, "seconds": seconds, "cpu_seconds": process_time() - cpu + loaders.ru_utime + loaders.ru_stime}

    return measure
