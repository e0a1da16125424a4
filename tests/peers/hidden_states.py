"""Hidden states both ways between eaglet and speculators 0.9.

    pip install torch safetensors datasets speculators==0.9.0
    eaglet extract cluster.toml --out DIR
    python tests/peers/hidden_states.py read DIR          # speculators' training dataset reads what eaglet wrote
    python tests/peers/hidden_states.py write DIR THEIRS  # the same samples as speculators writes them, without a contract
    eaglet launch cluster.toml --set samples.hidden_states='"THEIRS"' --set samples.held_out=[]
"""

import json
import sys
from pathlib import Path

import pyarrow
import torch
from datasets import Dataset
from datasets.table import InMemoryTable as Table
from safetensors.torch import load_file, save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.train.data import ArrowDataset


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").open()]


def dataset(folder):
    """What `speculators prepare-data` leaves beside the hidden states."""
    Dataset(Table(pyarrow.Table.from_pylist(samples(folder))), fingerprint="eaglet").save_to_disk(folder)
    state = folder / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_format_type": "torch"}))


def read(folder):
    dataset(folder)
    read = ArrowDataset(max_len=1 << 20, datapath=folder, on_missing="raise")
    lines = samples(folder)
    assert len(read) == len(lines)
    tokens = 0
    for index, line in enumerate(lines):
        stored = load_file(folder / "hidden_states" / f"hs_{index}.safetensors")
        check_hidden_states(stored, line["input_ids"])
        item, states = read[index], stored["hidden_states"]
        assert item["input_ids"].tolist() == line["input_ids"]
        assert item["loss_mask"].tolist() == line["loss_mask"]
        assert torch.equal(item["hidden_states"], states[:, :-1].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], states[:, -1])
        tokens += len(line["input_ids"])
    print(f"{len(lines)} samples of {tokens} tokens are read by speculators as eaglet wrote them")


def write(folder, theirs):
    states = theirs / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    (theirs / "samples.jsonl").write_bytes((folder / "samples.jsonl").read_bytes())
    dataset(theirs)
    for index, _ in enumerate(samples(folder)):
        save_file(load_file(folder / "hidden_states" / f"hs_{index}.safetensors"), states / f"hs_{index}.safetensors")


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](*map(Path, sys.argv[2:]))
