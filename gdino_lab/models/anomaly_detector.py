"""Grounding DINO with heads that say how anomalous an image is, and where."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class AnomalyDetector(nn.Module):
    """The detector without its box heads, the anomaly heads on top.

    `detector` stays a plain transformers model: its weights are saved and loaded as such, the heads beside them.
    """

    def __init__(self, detector: PreTrainedModel, part_kinds: int):
        super().__init__()
        self.detector = detector
        self.heads = AnomalyHeads(detector.config.d_model, detector.config.num_feature_levels, part_kinds)

    def forward(
        self,
        pixel_values: Tensor,
        pixel_mask: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
    ) -> dict[str, Tensor]:
        """
        Args:
            pixel_values: (B, 3, H, W); pixel_mask: (B, H, W), 1 for real pixels.
            input_ids, attention_mask, token_type_ids: (B, L), the prompt.

        Returns:
            The heads' outputs (see AnomalyHeads.forward) and valid (B, S) bool, False for padding tokens.
        """
        # `.model` leaves the box heads out; the decoder runs, so that the queries (and with them every layer) train.
        outputs = self.detector.model(
            pixel_values=pixel_values,
            pixel_mask=pixel_mask,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
        )
        sizes = level_sizes(self.detector.config, *pixel_values.shape[-2:])
        valid = token_mask(pixel_mask, sizes)
        return self.heads(
            outputs.encoder_last_hidden_state_vision,
            outputs.encoder_last_hidden_state_text,
            attention_mask.bool(),
            outputs.last_hidden_state,
            valid,
            sizes,
        ) | {"valid": valid}


# Sigmoid of it is 2 %: a normal image has no anomalous token, and training need not begin by learning that.
QUIET = -4.0


class AnomalyHeads(nn.Module):
    """Three heads. Local: one logit a token. Parts: which kind of part a token shows. Global: one logit an image, from
    statistics over the *set* of tokens and queries, which keep counts; a maximum would not notice a missing part."""

    def __init__(self, width: int, levels: int, part_kinds: int):
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.local = nn.Sequential(nn.Linear(width + 1, width), nn.GELU(), nn.Linear(width, 1))
        self.parts = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, part_kinds + 1))
        self.evidence = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.query_evidence = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        statistics = 2 * width * (levels + 1)
        self.statistics_norm = nn.LayerNorm(statistics)
        self.verdict = nn.Sequential(nn.Linear(statistics + part_kinds, width), nn.GELU(), nn.Linear(width, 1))
        nn.init.constant_(self.local[-1].bias, QUIET)

    def forward(
        self, vision: Tensor, text: Tensor, text_mask: Tensor, queries: Tensor, valid: Tensor, sizes: list[tuple]
    ) -> dict[str, Tensor]:
        """
        Args:
            vision (B, S, d), text (B, L, d), text_mask (B, L) bool, queries (B, Q, d), valid (B, S) bool;
            sizes: (h, w) of each feature level, finest first.

        Returns:
            fp32 whatever the model's precision: global_logit (B,); local_logits (B, S); kind_logits (B, F, K + 1) for
            the F tokens of the finest level; histogram (B, K), each kind's share of the image; pooled (B, levels * d),
            the mean of each level's tokens.
        """
        cosine = torch.einsum("bsd,bld->bsl", F.normalize(vision, dim=-1), F.normalize(text, dim=-1))
        cosine = cosine.masked_fill(~text_mask[:, None], -1.0).amax(-1, keepdim=True)
        tokens = self.token_norm(vision)
        local_logits = self.local(torch.cat([tokens, cosine.to(tokens.dtype)], -1)).squeeze(-1)

        lengths = [height * width for height, width in sizes]
        kind_logits = self.parts(tokens[:, : lengths[0]]).float()
        histogram = mean_and_std(kind_logits.softmax(-1), valid[:, : lengths[0]])[0][:, 1:]

        everything = queries.new_ones(queries.shape[:2], dtype=torch.bool)
        statistics = list(mean_and_std(self.query_evidence(queries).float(), everything))
        for evidence, mask in zip(self.evidence(tokens).split(lengths, 1), valid.split(lengths, 1), strict=True):
            statistics += mean_and_std(evidence.float(), mask)
        normed = self.statistics_norm(torch.cat(statistics, -1).to(tokens.dtype))
        # The logarithm tells two nuts from three as well as one from two, at any image size.
        counts = (histogram + 1e-3).log().to(normed.dtype)
        global_logit = self.verdict(torch.cat([normed, counts], -1)).squeeze(-1)

        pooled = [
            mean_and_std(level.float(), mask)[0]
            for level, mask in zip(vision.split(lengths, 1), valid.split(lengths, 1), strict=True)
        ]
        return {
            "global_logit": global_logit.float(),
            "local_logits": local_logits.float(),
            "kind_logits": kind_logits,
            "histogram": histogram,
            "pooled": torch.cat(pooled, -1),
        }


def mean_and_std(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Over valid tokens: (B, N, d), (B, N) bool -> two (B, d). An all-padding level gives zeros."""
    weight = valid.to(tokens.dtype)[..., None]
    count = weight.sum(1).clamp(min=1)
    mean = (tokens * weight).sum(1) / count
    variance = ((tokens - mean[:, None]) ** 2 * weight).sum(1) / count
    return mean, (variance + 1e-6).sqrt()


def level_sizes(config, height: int, width: int) -> list[tuple[int, int]]:
    """(h, w) of each feature level for an input of `height` x `width`: strided stages, then stride-2 convolutions."""
    strides = [config.backbone_config.patch_size * 2 ** (stage - 1) for stage in config.backbone_config.out_indices]
    sizes = [(math.ceil(height / stride), math.ceil(width / stride)) for stride in strides]
    while len(sizes) < config.num_feature_levels:
        sizes.append((math.ceil(sizes[-1][0] / 2), math.ceil(sizes[-1][1] / 2)))
    return sizes


def token_mask(pixel_mask: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """(B, H, W) -> (B, S) bool, sampled as the model samples its own masks (nearest)."""
    mask = pixel_mask[:, None].float()
    return torch.cat([F.interpolate(mask, size=size).flatten(1).bool() for size in sizes], 1)


def token_targets(changed: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """(B, H, W) changed pixels -> (B, S) fp32: 1 where any pixel under a token was changed."""
    changed = changed[:, None].float()
    return torch.cat([F.adaptive_max_pool2d(changed, size).flatten(1) for size in sizes], 1)


def kind_targets(kinds: Tensor, size: tuple[int, int], part_kinds: int) -> Tensor:
    """(B, H, W) kinds of parts, 0 to part_kinds -> (B, h * w, part_kinds + 1): each one's share of a token's pixels."""
    shares = F.one_hot(kinds.long(), part_kinds + 1).permute(0, 3, 1, 2).float()
    return F.adaptive_avg_pool2d(shares, size).flatten(2).transpose(1, 2)


def heatmap(local_logits: Tensor, sizes: list[tuple[int, int]], height: int, width: int) -> Tensor:
    """(B, S) logits -> (B, height, width): the levels' probabilities, upsampled and averaged."""
    maps = [
        F.interpolate(level.unflatten(1, size)[:, None].sigmoid(), (height, width), mode="bilinear")
        for level, size in zip(local_logits.split([h * w for h, w in sizes], 1), sizes, strict=True)
    ]
    return torch.stack(maps).mean(0)[:, 0]
