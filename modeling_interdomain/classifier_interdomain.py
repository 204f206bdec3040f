"""A classifier of texts and images: the model with a linear head."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple

from .configuration_interdomain import InterdomainConfig
from .inputs.checks import check_class_labels, check_mask, check_tensors, check_tokens, embed_ids
from .inputs.keywords import takes_known_keywords
from .modeling_interdomain import InterdomainModel, InterdomainPreTrainedModel
from .ops.common.cpu import in_graph
from .outputs.layer_losses import InterdomainClassifierOutput, at_least_one


class PatchEmbedding(nn.Module):
    """`[B, channels, height, width]` to `[B, tokens, hidden_size]`, patches row by row; `patch_size` 1 means pixels."""

    def __init__(self, config):
        super().__init__()
        self.channels, self.patch_size = config.num_channels, config.patch_size
        self.proj = nn.Linear(self.channels * self.patch_size**2, config.hidden_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        check_tensors(pixel_values=pixel_values)
        if not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values must be of a floating dtype, as an image processor gives them, got {pixel_values.dtype}."
            )
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.channels or not pixel_values.numel():
            raise ValueError(
                f"pixel_values must have shape [B, {self.channels}, height, width], got {list(pixel_values.shape)}."
            )
        if any(size % self.patch_size for size in pixel_values.shape[2:]):
            raise ValueError(
                f"pixel_values of {list(pixel_values.shape[2:])} pixels cannot be cut into patches of "
                f"{self.patch_size}; resize the images to a multiple of it."
            )
        patches = nn.functional.unfold(pixel_values, self.patch_size, stride=self.patch_size)
        weight: Any = self.proj.weight
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():  # a quantized map converts by itself
            patches = patches.to(weight.dtype)
        return self.proj(patches.mT)


class InterdomainForSequenceClassification(InterdomainPreTrainedModel):
    """The model with a linear head on the last real token of each row, or on a learned token after it.

    Reads token ids, embeddings, or with `config.patch_size` images. `config.use_cls_token` appends `cls_token`
    `[hidden_size]` at the end, where it has seen all other tokens.
    """

    # The loss is a mean over rows, which the `Trainer` divides by the number of batches that it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: InterdomainConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = InterdomainModel(config)
        self.patches = None if config.patch_size is None else PatchEmbedding(config)
        self.cls_token = nn.Parameter(torch.zeros(config.hidden_size)) if config.use_cls_token else None
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def start_parameters(self, config) -> None:
        if self.cls_token is not None:
            init.normal_(self.cls_token, std=config.initializer_range)

    @takes_known_keywords
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs,
    ) -> InterdomainClassifierOutput:
        """As `InterdomainModel.forward`, and:

        Args:
            labels: `[B]` class indices, or what `config.problem_type` asks for. Adds `loss`; rows of class -100 do not
                count, and where there are no others it is 0, with gradients of 0.
            pixel_values: `[B, num_channels, height, width]`, instead of ids or embeddings.

        Returns:
            logits `[B, num_labels]`, read at the learned token or at the last token that `attention_mask` marks as
            real (without one `[B, T]`: the last one that is not `pad_token_id`).

        Raises:
            ValueError: when the inputs do not fit the model or each other.
        """
        if pixel_values is not None:
            inputs_embeds = self._embed_images(pixel_values, input_ids, inputs_embeds)
        if input_ids is None and inputs_embeds is None:
            raise ValueError("Give exactly one of input_ids, inputs_embeds and pixel_values.")
        check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        check_class_labels(labels, self.config, batch)
        real = self._real_tokens(input_ids, attention_mask, inputs_embeds)
        if self.cls_token is not None:
            asked = (past_key_values, position_ids, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"))
            if any(x is not None for x in asked):
                raise ValueError(
                    "A classifier with use_cls_token reads whole rows: leave past_key_values, position_ids, "
                    "cu_seq_lens_q and seq_idx out."
                )
            if inputs_embeds is None:
                inputs_embeds = embed_ids(self.model.embed_tokens, input_ids)
            check_tensors(attention_mask=attention_mask)
            if attention_mask is not None and attention_mask.shape != (batch, length):
                raise ValueError(
                    f"attention_mask must have shape {[batch, length]}, one number a token without the learned one, "
                    f"got {list(attention_mask.shape)}."
                )
            check_mask(attention_mask, 0, batch, length)
            cls_token = self.cls_token.to(inputs_embeds.dtype).expand(batch, 1, -1)
            inputs_embeds, input_ids, use_cache = torch.cat([inputs_embeds, cls_token], dim=1), None, False
            real = torch.cat([real, real.new_ones(batch, 1)], dim=1)
            attention_mask = None if not in_graph() and bool(real.all()) else real.long()
        if kwargs.get("sequence_group") is not None:
            raise ValueError("A classifier reads the last token of whole rows: leave sequence_group out.")
        self._ask_for_losses(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        length = hidden_states.shape[1]
        last = (torch.arange(length, device=real.device) * real).argmax(dim=1).to(hidden_states.device)
        # Not by the numbers of the rows, of which a traced or exported graph would keep how many there were.
        at_last = last[:, None, None].expand(-1, -1, hidden_states.shape[-1])
        logits = self.score(hidden_states.gather(1, at_last)[:, 0])
        loss = None
        if labels is not None:
            arguments: Any = {"pooled_logits": logits, "config": self.config}
            if self._counts_labels():
                arguments["num_items_in_batch"] = at_least_one((labels != -100).sum())
            loss = self.loss_function(logits=logits, labels=labels, **arguments)
        return InterdomainClassifierOutput(logits=logits, **self._with_layer_losses(outputs, loss))

    def _embed_images(self, pixel_values, input_ids, inputs_embeds) -> torch.Tensor:
        if self.patches is None:
            raise ValueError("pixel_values need a model with patch_size in its configuration.")
        if input_ids is not None or inputs_embeds is not None:
            raise ValueError("Give exactly one of input_ids, inputs_embeds and pixel_values.")
        return self.patches(pixel_values)

    def _real_tokens(self, input_ids, attention_mask, inputs_embeds) -> torch.Tensor:
        """`[B, T]` bool, False for pads."""
        tokens = inputs_embeds if input_ids is None else input_ids
        batch, length = tokens.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            return attention_mask[:, -length:] != 0
        if input_ids is not None and self.config.pad_token_id is not None:
            return input_ids != self.config.pad_token_id
        return torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
