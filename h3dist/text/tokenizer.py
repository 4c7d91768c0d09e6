"""From a prompt to token ids, with nothing added: no template, no BOS, no EOS; the text arrives as it is.

The tokenizer is Qwen2's with seven tokens that MiniMax H3 adds. It is in no single-file checkpoint and comes
from a folder. transformers is imported where it is used, so that a planner can count tokens without it.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from h3dist.errors import CheckpointError
from h3dist.text.presentation import Piece, Presentation, present

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

H3_TOKENS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
REPOSITORY = "MiniMaxAI/MiniMax-H3"
SUBFOLDER = "FL2VA/tokenizer"
REVISION = "42ed227ee7df40d41602854ae760620d6eb651fe"


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face folder, by transformers.

    Raises CheckpointError where the folder or its tokenizer.json is absent (with the command that fetches
    it), where it does not load, or where the seven H3 tokens are not single tokens at consecutive ids.
    """
    _tokenizer_file(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a broken folder
        raise CheckpointError(f"the tokenizer in {folder} does not load: {error}") from error
    _check_h3_tokens(folder, lambda text: tokenize(tokenizer, text))
    return tokenizer


def tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of `text` and of nothing else."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def present_t2va(prompt: str, tokenizer: "PreTrainedTokenizerBase") -> Presentation:
    """The presentation of a text-only request: the prompt alone, every row tagged as text."""
    return present([prompt], lambda text: tokenize(tokenizer, text))


def count_tokens(folder: str, *found: Piece) -> int:
    """How many rows `present` gives for the pieces `found`, by the `tokenizers` package alone.

    Raises CheckpointError as `load_tokenizer` does, and what `present` raises.
    """
    tokenizer = _light_tokenizer(folder)

    def encode(piece: str) -> list[int]:
        return tokenizer.encode(piece, add_special_tokens=False).ids

    _check_h3_tokens(folder, encode)
    return len(present(found, encode).ids)


def fetch_advice(folder: str) -> str:
    """How to get the released tokenizer: the exact command, the size, and the folder to name afterwards."""
    parent = Path(folder).parent
    where = shlex.quote(str(parent))
    return (
        f"Fetch it (about 11 MB) with\n"
        f'  hf download {REPOSITORY} --revision {REVISION} --include "{SUBFOLDER}/*" --local-dir {where}\n'
        f"then name {parent / SUBFOLDER} as model.tokenizer or in H3_TOKENIZER_PATH; "
        f"its seven H3 tokens {H3_TOKENS[0]} .. {H3_TOKENS[-1]} have the ids 151669 .. 151675"
    )


def _tokenizer_file(folder: str) -> Path:
    path = Path(folder) / "tokenizer.json"
    if path.is_file():
        return path
    why = "the folder has no tokenizer.json" if Path(folder).is_dir() else "there is no such folder"
    raise CheckpointError(f"no tokenizer at {folder}: {why}; it is in no checkpoint file. {fetch_advice(folder)}")


def _light_tokenizer(folder: str) -> "tokenizers.Tokenizer":
    """The same tokenizer without transformers: tokenizer.json and the tokens that the config declares."""
    path = _tokenizer_file(folder)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        declared = _declared_tokens(path.with_name("tokenizer_config.json"))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise CheckpointError(f"the tokenizer in {folder} does not load: {error}") from error
    tokenizer.add_special_tokens([token for token in declared if tokenizer.token_to_id(token) is None])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _declared_tokens(path: Path) -> list[str]:
    """Special tokens that a tokenizer_config.json lists: the released one declares H3's seven only there."""
    if not path.is_file():
        return []
    config = json.loads(path.read_text(encoding="utf-8"))
    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    listed = [token for _, token in by_id]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or []
        listed += tokens.values() if isinstance(tokens, dict) else tokens
    return [token["content"] if isinstance(token, dict) else token for token in listed]


def _check_h3_tokens(folder: str, encode: Callable[[str], list[int]]) -> None:
    """Raises CheckpointError unless each H3 token is one id, and the ids follow each other in order."""
    found = {token: encode(token) for token in H3_TOKENS}
    flat = [i for ids in found.values() for i in ids]
    if all(found.values()) and flat == [flat[0] + i for i in range(len(H3_TOKENS))]:
        return
    shown = ", ".join(f"{token} {' '.join(map(str, ids))}" for token, ids in found.items())
    raise CheckpointError(
        f"the tokenizer in {folder} is not MiniMax H3's: its seven tokens must be single ones at consecutive "
        f"ids, found {shown}. {fetch_advice(folder)}"
    )
