"""The denoiser on one rank: latents of a step in, velocities out.

Shape letters: S all rows, s this rank's rows, L text rows, C hidden, O outputs of both heads (4 * 24 + 32).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.model.block import View, run_block
from h3dist.model.dense import Linear, dense_linear
from h3dist.model.elementwise import PLAIN, Elementwise, Run
from h3dist.model.exchange import Exchange
from h3dist.model.modulation import KEPT_PAIRS, PAIRS, STREAMS, Modulation, StepTables
from h3dist.model.narrow import activation_of_run
from h3dist.model.residual import Residual
from h3dist.model.rotary import rotation
from h3dist.model.weights import DenoiserWeights
from h3dist.packing import Packing, audio_to_rows, own_segments, patchify, rows_to_audio, unpatchify
from h3dist.plan import Share


class Denoiser:
    """H3's velocity for one request. Calling it is a step; every rank of the layout calls it together.

    text_rows_LC: the refined text rows, all of them, on every rank. kept: the rows of the conditions, f32, by
    kind: "kept video" [n, 96], "kept audio" [n, 32]; the same at every step, and never stepped. A rank embeds
    only its own rows, which may be none, and the hidden states never leave it whole: after the last block the
    outputs are gathered.
    """

    def __init__(
        self,
        weights: DenoiserWeights,
        packing: Packing,
        share: Share,
        modulation: Modulation,
        exchange: Exchange,
        attention: Attention,
        text_rows_LC: Tensor,
        linear: Linear = dense_linear,
        kept: Mapping[str, Tensor] | None = None,
        elementwise: Elementwise = PLAIN,
    ) -> None:
        self.weights = weights
        self.packing = packing
        self.modulation = modulation
        self.text_rows_LC = text_rows_LC.to(weights.device, weights.dtype)
        self.kept = {kind: rows.to(weights.device, torch.float32) for kind, rows in (kept or {}).items()}
        self.own_rows = share.rows[1] - share.rows[0]
        self.segments = own_segments(packing, *share.rows)
        # Of the outputs only the clip's own are used: other rows may have either stream's final modulation.
        self.final_runs = tuple(Run(s.start, s.stop, STREAMS.index(_stream(s.kind))) for s in self.segments)
        self.view = View(
            runs=tuple(Run(s.start, s.stop, (*PAIRS, *KEPT_PAIRS).index((s.time, s.tag))) for s in self.segments),
            rotation=elementwise.prepare(
                rotation(packing.position_ids[slice(*share.projected_rows)], weights.inv_freq, weights.dtype)
            ),
            exchange=exchange,
            attention=attention,
            linear=linear,
            elementwise=activation_of_run(elementwise, (block.fc2 for block in weights.blocks)),
        )

    @torch.no_grad()
    def __call__(self, video: Tensor, audio: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Data-ward velocities (x0 = x + sigma v) of video [1, 24, T, h, w] and audio [1, 32, 2, A], in f32.

        The latents are whole and equal on every rank, and so are the velocities, on the latents' device.
        """
        return self.evaluate(video, audio, self.modulation.at(step))

    @torch.no_grad()
    def evaluate(self, video: Tensor, audio: Tensor, tables: StepTables) -> tuple[Tensor, Tensor]:
        """The same with the modulation that is given. On one rank whose latents and weights are on one GPU nothing
        here waits for it or comes from the host, once each kernel has run before."""
        stream = self.stream(self.embed(video, audio))
        for block, table_R6C in enumerate(tables.blocks):
            run_block(stream, self.weights.blocks[block], table_R6C, self.view)
        out_SO = self.view.exchange.gather_outputs(self._outputs(stream.whole(), tables.final))
        return self.split(out_SO.to(video.device))

    def embed(self, video: Tensor, audio: Tensor) -> Tensor:
        """x_sC: this rank's rows, latents projected in float32 and then cast to the compute dtype."""
        latents = {"video": patchify(video), "audio": audio_to_rows(audio), **self.kept}
        x_sC = self.text_rows_LC.new_empty(self.own_rows, self.weights.dims.hidden)
        for segment in self.segments:
            source = slice(segment.source, segment.source + segment.stop - segment.start)
            x_sC[segment.start : segment.stop] = self._embed_rows(segment.kind, latents, source)
        return x_sC

    def _embed_rows(self, kind: str, latents: dict[str, Tensor], source: slice) -> Tensor:
        if kind == "text":
            return self.text_rows_LC[source]
        layer = self.weights.video_in if _stream(kind) == "video" else self.weights.audio_in
        return F.linear(latents[kind][source].to(self.weights.device, torch.float32), *layer)

    def stream(self, x_sC: Tensor) -> Residual:
        """The residual stream that blocks are applied to; x_sC is changed in place."""
        return Residual(x_sC, self.view.runs, self.view.elementwise)

    def run_block(self, stream: Residual, block: int, step: int) -> None:
        """Apply one block to the stream, as at a step of the schedule."""
        run_block(stream, self.weights.blocks[block], self.modulation.blocks[block][step], self.view)

    def outputs(self, x_sC: Tensor, step: int) -> Tensor:
        """out_sO: both heads over own rows, in float32."""
        return self._outputs(x_sC, self.modulation.final[step])

    def _outputs(self, x_sC: Tensor, final_22C: Tensor) -> Tensor:
        h_sC = self.view.elementwise.modulate(x_sC, self.weights.final_norm, final_22C, self.final_runs)
        return F.linear(h_sC.to(torch.float32), *self.weights.heads)

    def split(self, out_SO: Tensor) -> tuple[Tensor, Tensor]:
        """The video head's outputs of the video rows and the audio head's of the audio rows, as latents."""
        width = self.weights.video_in.weight.shape[1]
        video = unpatchify(out_SO[self.packing.span("video"), :width], self.packing.geometry)
        return video, rows_to_audio(out_SO[self.packing.span("audio"), width:])


def _stream(kind: str) -> str:
    """Of which kind a row of latents is, the clip's own or a condition's."""
    return "audio" if kind.endswith("audio") else "video"
