"""Small instruction data: a tokenizer with special tokens, a template, conversations as files and as corpora."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ascend_moe_train.data.prepare import ChatOptions, Prepared, prepare

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Messages = Sequence[dict[str, Any]]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer of 260 ids with chat markers; <think> is an added token that is not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": None}))
    return folder / "tokenizer.json"


def talk(*contents: str) -> list[dict[str, Any]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def write_conversations(path: Path, conversations: Sequence[Messages]) -> Path:
    """One conversation per line."""
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prepare_chat(
    folder: Path, conversations: Sequence[Messages], *, valid_fraction: float = 0.0, **options: Any
) -> Prepared:
    """A corpus of conversations in `folder`/corpus."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    source = write_conversations(folder / "talks.jsonl", conversations)
    return prepare(
        sources=[str(source)],
        out=folder / "corpus",
        tokenizer=tokenizer,
        valid_fraction=valid_fraction,
        chat=ChatOptions(**options),
        force=True,
    )
