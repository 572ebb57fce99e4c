"""Grounding DINO as its criterion wants it: the predictions of the encoder and of every decoder layer, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class BoxDetector(nn.Module):
    """The detector with all its own heads and no others.

    `detector` stays a plain transformers model; what transformers computes wrongly for training is computed here from
    its outputs, so nothing in it is patched and its weights are interchangeable.
    """

    def __init__(self, detector: PreTrainedModel):
        super().__init__()
        self.detector = detector

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
            input_ids, attention_mask, token_type_ids: (B, L), the prompts.

        Returns:
            logits (S, B, Q, L), -inf where a token is padding, and boxes (S, B, Q, 4), cxcywh as fractions of the image
            without its padding, both fp32: S sets, the encoder's proposals first, then the decoder's layers, the final
            one last. While evaluating, the final one only (S = 1). text_mask (B, L) bool.
        """
        detector, text_mask = self.detector, attention_mask.bool()
        outputs = detector.model(
            pixel_values=pixel_values,
            pixel_mask=pixel_mask,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
        )
        # Layer i refines the boxes that layer i - 1 ended with.
        starts = [outputs.init_reference_points, *outputs.intermediate_reference_points.unbind(1)[:-1]]
        hidden = outputs.intermediate_hidden_states.unbind(1)
        logits, boxes = [], []
        if self.training:
            proposals = encoder_proposals(
                outputs.enc_outputs_class, outputs.enc_outputs_coord_logits, detector.config.num_queries
            )
            logits.append(proposals[0])
            boxes.append(proposals[1])
        for layer in range(len(hidden)) if self.training else [len(hidden) - 1]:
            logits.append(detector.class_embed[layer](hidden[layer], outputs.encoder_last_hidden_state_text, text_mask))
            start = torch.special.logit(starts[layer].float(), eps=1e-5)
            boxes.append((detector.bbox_embed[layer](hidden[layer]).float() + start).sigmoid())
        length = input_ids.shape[1]
        return {
            "logits": torch.stack([each[..., :length].float() for each in logits]),
            "boxes": torch.stack(boxes),
            "text_mask": text_mask,
        }


def encoder_proposals(class_logits: Tensor, box_logits: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """The proposals that the decoder starts from, with their gradients: logits (B, Q, L) and boxes (B, Q, 4) fp32.

    transformers returns them detached, and with logits that do not depend on the image; DINO (Zhang et al. 2022)
    trains its encoder head on them.

    Args:
        class_logits (B, N, L) and box_logits (B, N, 4): the encoder head's at each of N places.
    """
    best = class_logits.detach().amax(-1).topk(queries, dim=1).indices[..., None]
    logits = class_logits.gather(1, best.expand(-1, -1, class_logits.shape[-1]))
    boxes = box_logits.gather(1, best.expand(-1, -1, 4)).float().sigmoid()
    return logits, boxes


def class_scores(logits: Tensor, class_tokens: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """One class a query: the one whose tokens score highest.

    Args:
        logits: (B, Q, L); class_tokens: (B, C, L) bool, rows without any token for classes an image is not asked for.
        reduction: "mean" or "max" over the tokens of a class.

    Returns:
        scores (B, Q) in [0, 1] and classes (B, Q), the row in class_tokens.
    """
    probability = logits.sigmoid()
    share = class_tokens.to(probability.dtype)
    if reduction == "mean":
        by_class = torch.einsum("bql,bcl->bqc", probability, share / share.sum(-1, keepdim=True).clamp(min=1))
    else:
        by_class = (probability[:, :, None] * share[:, None]).amax(-1)
    asked = class_tokens.any(-1)[:, None]
    return by_class.masked_fill(~asked, -1.0).max(-1)
