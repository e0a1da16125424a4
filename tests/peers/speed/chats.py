"""Chats as the rows that speculators trains on: `input_ids` and `loss_mask`, made with transformers' chat template."""

import json

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def conversations(path):
    """The conversations of a chats file, as lists of {"role", "content"}."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            chat = json.loads(line)
            yield [
                {"role": ROLES[turn.get("from") or turn["role"]], "content": turn["value"] if "value" in turn else turn["content"]}
                for turn in chat.get("conversations") or chat["messages"]
            ]


def row(tokenizer, messages, longest):
    """One conversation, cut to `longest` tokens; answers have loss mask 1. None if nothing of it is trained."""
    render = lambda turns, **options: tokenizer.apply_chat_template(turns, tokenize=False, **options)
    text, answers = render(messages), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:index], add_generation_prompt=True), render(messages[: index + 1])
            if not (text.startswith(before) and text.startswith(after)):
                return None
            answers.append((len(before), len(after)))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=True, max_length=longest)
    mask = [int(any(start <= at < end for start, end in answers)) for at, _ in tokens["offset_mapping"]]
    return {"input_ids": tokens["input_ids"], "loss_mask": mask, "seq_len": len(mask)} if any(mask) else None


def rows(tokenizer, path, longest, budget):
    """Rows of the file's first conversations, until they have `budget` tokens."""
    result, tokens = [], 0
    for messages in conversations(path):
        made = row(tokenizer, messages, longest)
        if made is not None:
            result.append(made)
            tokens += made["seq_len"]
        if tokens >= budget:
            return result
    raise ValueError(f"{path} has only {tokens} of {budget} tokens")
