"""The tokenizer: prompts reach it untouched, the seven H3 tokens are checked, both readers agree."""

import json
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from h3dist.errors import CheckpointError
from h3dist.text.presentation import TEXT_TAG
from h3dist.text.tokenizer import H3_TOKENS, count_tokens, load_tokenizer, present_t2va, tokenize

STOCK = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROMPTS = {
    "dialogue": "<d>[English] Hi.</d>",
    "comma": "a cat, a dog",
    "boolean": "true",
    "null": "null",
    "number": "123",
    "interpolation": "${oops} ${oc.env:HOME} $HOME $(id) `id`",
    "missing": "???",
    "quotes": "She says, \"it's 'fine'\" \\ \\\" {a: b} [x] # no comment",
    "equals": "request.prompt=a,b=c",
    "newlines": "first\nsecond\r\nthird\ttab\n\n",
    "cjk": "雨の夜、彼女は窓辺に立つ。안녕 你好",
    "emoji": "a 🐈‍⬛ and a 👩🏽‍🚀 é e\u0301",
    "spaces": "   leading and trailing   ",
    "only spaces": "  ",
    "markup": "<|caption_start|>x<|caption_end|> <|cutoff|> <|im_start|> <|image_pad|> </s> <dd>",
    "long": "word " * 3000,
}


def write_tokenizer(folder: Path, *, registered: tuple[str, ...] = STOCK + H3_TOKENS, **config) -> str:
    """A byte-level tokenizer in Qwen2's form, its special tokens after the 256 bytes and a few merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "t"), ("c", "at"), ("Ġ", "cat")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(registered))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": STOCK[0], "pad_token": STOCK[0], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


class Recorder:
    """A tokenizer that keeps what it was called with."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def __call__(self, text, **kw):
        self.calls.append((text, kw))
        return self.tokenizer(text, **kw)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_reaches_the_tokenizer_byte_for_byte_and_alone(tokenizer, prompt):
    recorder = Recorder(tokenizer)
    presentation = present_t2va(prompt, recorder)
    [(text, options)] = recorder.calls
    assert text.encode() == prompt.encode() and options["add_special_tokens"] is False
    decoded = tokenizer.decode(presentation.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoded == unicodedata.normalize("NFC", prompt)
    assert set(presentation.tags) == {TEXT_TAG} and len(presentation.tags) == len(presentation.ids)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_counting_agrees_with_tokenizing(folder, tokenizer, prompt):
    assert count_tokens(folder, prompt) == len(present_t2va(prompt, tokenizer).ids)


def test_each_h3_token_is_one_id_inside_text(tokenizer):
    first = tokenize(tokenizer, "<d>")[0]
    for i, token in enumerate(H3_TOKENS):
        assert tokenize(tokenizer, f"a{token}b").count(first + i) == 1
        assert len(tokenize(tokenizer, f"a{token}b")) == 3
    assert len(tokenize(tokenizer, "<dd>")) == 4


def test_pieces_tokenized_apart_are_not_merged(tokenizer):
    assert tokenize(tokenizer, " cat") != tokenize(tokenizer, " c") + tokenize(tokenizer, "at")
    assert tokenize(tokenizer, "<Picture 1>: ")[-1] == tokenize(tokenizer, " ")[0]


def test_an_empty_presentation_is_the_end_of_text_token(folder, tokenizer):
    presentation = present_t2va("", tokenizer)
    assert presentation.ids == (tokenizer.convert_tokens_to_ids("<|endoftext|>"),)
    assert presentation.tags == (TEXT_TAG,) and count_tokens(folder, "") == 1


def test_the_text_tag_is_the_packings():
    from h3dist import packing

    assert TEXT_TAG == packing.TEXT_TAG


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_h3_tokens_that_only_the_config_declares_are_registered(tmp_path, key):
    """The released folder is of this form: tokenizer.json ends before the seven tokens."""
    folder = write_tokenizer(tmp_path, registered=STOCK, **{key: [*STOCK[1:], *H3_TOKENS]})
    tokenizer = load_tokenizer(folder)
    last = tokenizer.convert_tokens_to_ids(STOCK[-1])
    assert [tokenize(tokenizer, token) for token in H3_TOKENS] == [[last + 1 + i] for i in range(7)]
    for prompt in PROMPTS.values():
        assert count_tokens(folder, prompt) == len(present_t2va(prompt, tokenizer).ids)


def test_a_config_that_numbers_its_tokens_is_read_in_their_order(tmp_path):
    registered = STOCK + H3_TOKENS
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(259 + i): {"content": token, **flags} for i, token in reversed(list(enumerate(registered)))}
    folder = write_tokenizer(tmp_path, registered=STOCK, added_tokens_decoder=decoder)
    tokenizer = load_tokenizer(folder)
    assert tokenize(tokenizer, "<d>") == [259 + len(STOCK)]
    assert count_tokens(folder, PROMPTS["dialogue"]) == len(tokenize(tokenizer, PROMPTS["dialogue"]))


@pytest.mark.parametrize(
    ("registered", "found"),
    [
        (STOCK, r"found <d> \d+ \d+ \d+, </d> \d+"),
        (STOCK + H3_TOKENS[:6], r"<\|caption_start\|> 270, <\|caption_end\|> \d+ \d+"),
        (STOCK + H3_TOKENS[::-1], "found <d> 271, </d> 270"),
        (H3_TOKENS[:3] + STOCK + H3_TOKENS[3:], r"<\|cutoff\|> 261, <\|lyrics_start\|> 268"),
    ],
    ids=["none", "six", "reversed", "apart"],
)
def test_a_tokenizer_without_h3s_tokens_in_a_row_is_refused_with_what_was_found(tmp_path, registered, found):
    folder = write_tokenizer(tmp_path, registered=registered)
    for read in (load_tokenizer, lambda where: count_tokens(where, "x")):
        with pytest.raises(CheckpointError, match=f"seven tokens.*{found}") as caught:
            read(folder)
        assert "hf download" in str(caught.value) and folder in str(caught.value)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["absent", "empty"])
def test_an_absent_tokenizer_says_how_to_get_it(tmp_path, make):
    folder = tmp_path / "text encoders" / "tokenizer"
    folder.parent.mkdir()
    make(folder)
    for read in (load_tokenizer, lambda where: count_tokens(where, "x")):
        with pytest.raises(CheckpointError) as caught:
            read(str(folder))
        message = str(caught.value)
        [command] = [line for line in message.splitlines() if "hf download" in line]
        words = shlex.split(command)
        assert words[:3] == ["hf", "download", "MiniMaxAI/MiniMax-H3"]
        assert len(words[words.index("--revision") + 1]) == 40
        assert words[words.index("--include") + 1] == "FL2VA/tokenizer/*"
        assert words[words.index("--local-dir") + 1] == str(folder.parent)
        assert str(folder.parent / "FL2VA" / "tokenizer") in message
        assert "11 MB" in message and "151669 .. 151675" in message


def test_a_broken_tokenizer_is_a_checkpoint_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("<html>")
    for read in (load_tokenizer, lambda where: count_tokens(where, "x")):
        with pytest.raises(CheckpointError, match="does not load"):
            read(str(tmp_path))


def test_counting_needs_neither_transformers_nor_torch(folder):
    code = (
        "import sys\nfrom h3dist.text.tokenizer import count_tokens\n"
        f"assert count_tokens({folder!r}, ' cat') == 1\n"
        "sys.exit(bool({'transformers', 'torch', 'diffusers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
