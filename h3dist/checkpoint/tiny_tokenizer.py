"""A small byte-level tokenizer of Qwen2's kind, with its special tokens and H3's seven after them."""

from __future__ import annotations

import json
from pathlib import Path

QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
H3_TOKENS = (
    "<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>", "<|caption_start|>", "<|caption_end|>",
)  # fmt: skip
# how Qwen2 parts text before it looks for pairs: contractions, words, single digits, signs, blanks
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SENTENCES = (
    "A quiet medium shot of a woman by a rain-streaked window at dawn.",
    'She says, "We should leave before the light changes."',
    "The camera moves slowly over the water while a cello plays.",
    "<Picture 1>: <Video 1>: <Audio 1>: <0.5 seconds>",
)
VOCABULARY = 340  # bytes and learnt pairs, before the special tokens


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a folder; gives the special tokens' ids.

    Trained on a few sentences: every byte has a token, so any text can be told, and the ids do not vary.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    parts = [
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    special = [*QWEN_TOKENS, *H3_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(special), indent=2), encoding="utf-8")
    return {token: tokenizer.token_to_id(token) for token in special}


def _config(special: list[str]) -> dict[str, object]:
    return {
        "add_prefix_space": None,
        "backend": "tokenizers",
        "bos_token": None,
        "eos_token": special[0],
        "extra_special_tokens": special[1:],
        "model_max_length": 131072,
        "pad_token": special[0],
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": special[0],
    }
