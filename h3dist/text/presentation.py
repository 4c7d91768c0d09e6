"""What the text encoder reads of a request: labels, vision blocks and the prompt, as pieces and as tokens.

Pieces follow from the prompt and the conditions' sizes alone, so that a planner can count their tokens. Nothing
is added to them: no template, no BOS, no EOS. Imports no torch and no transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from h3dist.conditions import Condition
from h3dist.errors import CheckpointError, RequestError
from h3dist.fitting import pair_seconds, vision_tokens

TEXT_TAG, VISION_TAG = 1, 0  # the modalities that modulate a text row and a row of a vision block
EMPTY_TOKEN = "<|endoftext|>"  # stands for a presentation of no tokens; id 151643 of the released tokenizer
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}  # where the vision tower's tokens go


@dataclass(frozen=True)
class VisionBlock:
    """Tokens of one picture, or of one pair of a video's frames; pad "image" or "video"."""

    pad: str
    tokens: int


@dataclass(frozen=True)
class Presentation:
    """What the text encoder reads: token ids [L], and of each row the modality tag [L]."""

    ids: tuple[int, ...]
    tags: tuple[int, ...]


Piece = str | VisionBlock


def pieces(prompt: str, conditions: Sequence[Condition], contract: str) -> list[Piece]:
    """The presentation in order: a label for each condition, numbered by kind, its vision blocks, the prompt.

    A still is a "<Picture i>: " and a block; a sound an "<Audio j>: " alone, and a film's own stands before the
    film; a video reference is a "<Video k>: " and, for each pair of its frames, "<T.T seconds>" and a block.
    Guides, which are keyframes of more than one frame, are not shown. (Both contracts.)
    """
    found: list[Piece] = []
    count = {"Picture": 0, "Audio": 0, "Video": 0}

    def label(name: str) -> None:
        count[name] += 1
        found.append(f"<{name} {count[name]}>: ")

    for condition in conditions:
        if condition.kind != "keyframe" and condition.samples:
            label("Audio")
        if condition.kind == "video":
            label("Video")
            for seconds in pair_seconds(condition.shown):
                found += [f"<{seconds:.1f} seconds>", VisionBlock("video", vision_tokens(condition, contract))]
        elif condition.shown:
            label("Picture")
            found.append(VisionBlock("image", vision_tokens(condition, contract)))
    return [*found, prompt]


def vision_rows(conditions: Sequence[Condition], contract: str) -> int:
    """How many rows of a presentation are vision blocks, their two ends included."""
    return sum(piece.tokens + 2 for piece in pieces("", conditions, contract) if isinstance(piece, VisionBlock))


def shown_rows(conditions: Sequence[Condition], contract: str) -> int:
    """How many rows of a presentation are tokens of the vision tower."""
    return sum(piece.tokens for piece in pieces("", conditions, contract) if isinstance(piece, VisionBlock))


def present(found: Sequence[Piece], encode: Callable[[str], list[int]]) -> Presentation:
    """The pieces as tokens; `encode` gives the ids of a text, of special tokens too, and of nothing else.

    Raises RequestError for a prompt that itself holds what stands for pictures, CheckpointError for a tokenizer
    without the vision tokens.
    """
    blocks = [piece for piece in found if isinstance(piece, VisionBlock)]
    if blocks:
        _check_prompt(found)
    ids: list[int] = []
    tags: list[int] = []
    for piece in found:
        some, tag = (encode(piece), TEXT_TAG) if isinstance(piece, str) else (_block(piece, encode), VISION_TAG)
        ids += some
        tags += [tag] * len(some)
    if not ids:
        return Presentation(tuple(encode(EMPTY_TOKEN)), (TEXT_TAG,))
    return Presentation(tuple(ids), tuple(tags))


def _block(block: VisionBlock, encode: Callable[[str], list[int]]) -> list[int]:
    start, pad, end = (_single(token, encode) for token in (VISION_START, PADS[block.pad], VISION_END))
    return [start, *[pad] * block.tokens, end]


def _single(token: str, encode: Callable[[str], list[int]]) -> int:
    ids = encode(token)
    if len(ids) != 1:
        raise CheckpointError(f"the tokenizer has no single token {token}: it is not Qwen3-VL's")
    return ids[0]


def _check_prompt(found: Sequence[Piece]) -> None:
    held = [pad for pad in PADS.values() if any(isinstance(piece, str) and pad in piece for piece in found)]
    if held:
        raise RequestError(f"the prompt holds {held[0]}, which stands for a picture here; name it <Picture 1>")
