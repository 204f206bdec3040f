"""What `generate()` asks of the language model beyond a forward."""

import os
from functools import partial
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import StoppingCriteriaList

from ..inputs.checks import (
    check_beside_drafts,
    check_cache_layers,
    check_early_exit,
    check_is_cache,
    check_layers,
    check_mask,
    check_prefill,
    check_rest,
    check_room,
    check_tensors,
    check_tokens,
)
from ..layers.versions import CACHE_NAME, takes_cache
from ..mixers.base import mixers_of
from ..model_cache.cache import InterdomainCache, InterdomainStaticCache, as_it_was_read
from .lookup import DraftGenerator, likely_guesses

# Names the store of a new model: "memory" or a folder.
STORE_VARIABLE = "INTERDOMAIN_PROMPT_STORE"
_OWN_CACHES = (InterdomainCache, InterdomainStaticCache)

# What `_assisted_decoding` passes to methods of this class alone: an assistant does not know it.
_OWN_SETTINGS = ("holds_whole_text", "spared_cache")


class InterdomainGenerationMixin(GenerationMixin):
    """The library's generation, with our caches, drafts that pay, prompts read once, and continuous batching.

    Attributes:
        prompt_store: a `StateStore` from which `generate()` and continuous batching take what was read before, or None.
            To begin with, what the environment variable INTERDOMAIN_PROMPT_STORE names, "memory" or a folder: so
            `transformers serve` has one.
    """

    config: Any
    device: Any
    prompt_store: Any = None

    generate = takes_cache(GenerationMixin.generate)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Make the cache `generate()` uses; a user's own cache is left alone."""
        given = model_kwargs.get(CACHE_NAME)
        check_early_exit(self.config, generation_config.assistant_early_exit)
        check_prefill(generation_config)
        rollback = _rollback(self.config, generation_config)
        if given is not None:
            check_is_cache(given)
            check_room(given, max_cache_length)
        if isinstance(given, _OWN_CACHES):
            given.allow_rollback(rollback)
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        check_layers(self.config, mixers_of(self.base_model.layers)[: self.config.num_hidden_layers])
        kind = generation_config.cache_implementation
        if kind in (None, "dynamic", "dynamic_full"):
            cache = InterdomainCache(self.config)
        elif kind == "static":
            # As long as the longest so far, so that a compiled step serves shorter texts.
            asked = getattr(generation_config, "max_cache_len", None) or 0
            self._longest_cache = max(max_cache_length, asked, getattr(self, "_longest_cache", 0))
            cache = InterdomainStaticCache(self.config, max_cache_len=self._longest_cache)
        else:
            raise ValueError(
                f"cache_implementation={kind!r} is not possible for an Interdomain model, whose caches are neither "
                'quantized nor offloaded: use "dynamic" or "static".'
            )
        cache.allow_rollback(rollback)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        """As in the library; bad prompts are refused, and masks hold 0 and 1, with which the library counts."""
        mask = model_kwargs.get("attention_mask")
        check_tensors(inputs=inputs, input_ids=model_kwargs.get("input_ids"), attention_mask=mask)
        tokens, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        arguments = (tokens, None) if name == "input_ids" else (None, tokens)
        check_tokens(*arguments, self.config.hidden_size)
        given = model_kwargs.get(CACHE_NAME)
        if isinstance(given, Cache):
            check_cache_layers(given, self.config)
            check_rest(given, tokens.shape[1], name, mask)
        if mask is not None and mask.ndim == 2:
            seen = 0 if given is None else mask.shape[1] - tokens.shape[1]
            check_mask(mask, seen, *tokens.shape[:2])
            model_kwargs["attention_mask"] = (mask != 0).long()
        return tokens, name, model_kwargs

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        """As in the library, which tells pads by their id; but the past is as the cache has read it."""
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        seen = int(cache.get_seq_length()) if isinstance(cache, _OWN_CACHES) else 0
        if 0 < seen < mask.shape[1]:
            mask = torch.cat([as_it_was_read(mask[:, :seen], cache), mask[:, seen:]], dim=1)
        return mask

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        past_key_values=None,
        inputs_embeds=None,
        holds_whole_text=False,
        spared_cache=None,
        **kwargs,
    ):
        """Leave out of a whole text what a user's cache has read, where `generate()` itself does not."""
        given = next_sequence_length is not None or inputs_embeds is not None
        if holds_whole_text and not given and isinstance(past_key_values, Cache):
            seen = int(past_key_values.get_seq_length())
            if 0 < seen < input_ids.shape[1]:
                next_sequence_length = input_ids.shape[1] - seen
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            **{CACHE_NAME: past_key_values},
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        # Checked here too: a compiled step on a GPU cannot raise, and a GPU does not recover from a bad index.
        room, positions = self.config.longest_text, inputs.get("position_ids")
        if room is not None and positions is not None:
            from ..mixers.softmax.dynamic_mask import check_position_table

            check_position_table(positions, room, self.config.dynamic_mask)
        return inputs

    def _get_candidate_generator(self, *, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """As in the library; prompt lookup drafts what is likely, see `generation/lookup.py`."""
        known = {name: x for name, x in model_kwargs.items() if name not in _OWN_SETTINGS}
        found = super()._get_candidate_generator(model_kwargs=known, **kwargs)
        cache, guesses = model_kwargs.get(CACHE_NAME), getattr(found, "num_assistant_tokens", None)
        if isinstance(cache, _OWN_CACHES) and guesses:  # as many as the assistant's own settings say
            cache.allow_rollback(int(guesses))
        return self.within_positions(likely_guesses(found, self.device, model_kwargs.get("spared_cache")))

    def within_positions(self, found: Any) -> Any:
        """Bound drafts by the positions that the model has: verifying one reads on behind where a text may end."""
        room = self.config.longest_text
        if isinstance(found, DraftGenerator) and room is not None:
            found.max_length = min(found.max_length, room + 1)
        return found

    def _assisted_decoding(self, input_ids: torch.Tensor, *, generation_config: Any, **kwargs: Any) -> Any:
        """As in the library, which leaves it to models whether ids include what a cache has read, or follow it.

        As in its other modes the mask tells: it is as long as the whole text; of one without a pad only the length is
        kept. A cache that did not record before records drafts alone where they are made here, and stops at the end.
        """
        check_beside_drafts(generation_config)
        mask, length = kwargs.get("attention_mask"), input_ids.shape[1]
        if not length and (mask is not None or generation_config.prompt_lookup_num_tokens is None):
            raise ValueError(
                "Guesses after inputs_embeds alone are possible without pads and with prompt_lookup_num_tokens: give "
                "input_ids too, or leave the assistant and the mask out."
            )
        told = getattr(generation_config, "_mask_length", length) if mask is None else mask.shape[1]
        cache = kwargs.get(CACHE_NAME)
        settings = {"generation_config": generation_config, "holds_whole_text": told == length, **kwargs}
        if not isinstance(cache, _OWN_CACHES) or not cache.recurrent_layers() or cache.records:
            return super()._assisted_decoding(input_ids, **settings)
        try:
            return super()._assisted_decoding(input_ids, spared_cache=cache, **settings)
        finally:
            cache.stop_recording()

    def _sample(self, input_ids: torch.Tensor, *, stopping_criteria: Any, generation_config: Any, **kwargs: Any) -> Any:
        """As in the library; with a `prompt_store` it goes on from what is known of the prompt."""
        settings = {"stopping_criteria": stopping_criteria, "generation_config": generation_config, **kwargs}
        reading = None
        if self.prompt_store is not None:
            from .prompt_store import prompt_reading

            reading = prompt_reading(self, input_ids, generation_config, kwargs)
        if reading is None:
            return super()._sample(input_ids, **settings)
        settings["stopping_criteria"] = StoppingCriteriaList([*stopping_criteria, reading])
        reading.begin()
        text = None
        try:
            written = super()._sample(input_ids, **settings)
            text = getattr(written, "sequences", written)
            return written
        finally:
            reading.finish(text)

    @property
    def init_continuous_batching(self):
        """As in the library: makes a manager of requests in flight, see `generation/serving.py`."""
        # Where a model has no such method, `transformers serve` says so and answers one request after the other.
        try:
            from .serving import RequestManager, why_not_served
        except ImportError as error:
            raise AttributeError(str(error)) from error
        if reason := why_not_served(self):
            raise AttributeError(reason)
        return partial(RequestManager, self)

    def continuous_batching_context_manager(self, *args, **kwargs):
        """As in the library: a manager that runs, and is stopped at the end."""
        from .serving import why_not_served

        if reason := why_not_served(self):
            raise NotImplementedError(reason)
        return super().continuous_batching_context_manager(*args, **kwargs)

    def generate_batch(self, inputs, generation_config=None, continuous_batching_config=None, **kwargs):
        """Write after many prompts with continuous batching.

        A request in flight is a row of one cache: as soon as one ends, the next prompt is read into its row. A state
        takes the same room whatever was read; keys and values, where layers keep them, that of the longest in flight.
        With a `prompt_store` a prompt costs what is new in it, also beside the other prompts of the call. The library's
        `generate(ids, cache_implementation="paged")` calls this.

        Args:
            inputs: token ids, a list for each prompt; of any lengths.
            generation_config: default: the model's own.
            continuous_batching_config: as of a `RequestManager`; or `max_batch_size` prompts in flight. Default: 8.
            kwargs: of a `GenerationConfig`, as for `generate`, and `progress_bar`.

        Returns:
            `{request id: GenerationOutput}` in the order of the prompts; `generated_tokens` are what `generate` writes
            after each prompt alone, up to rounding. Samples are drawn in another order, but the same seed, prompts and
            rows repeat them.

        Raises:
            NotImplementedError: for layers of one's own that keep other things.
            ValueError: for bad prompts and options, before anything is read; and when a text comes to the end of the
                positions that `dynamic_mask` "position" or "hard" knows.
        """
        from .batch import write_batch

        return write_batch(self, inputs, generation_config, continuous_batching_config, kwargs)


def store_of_environment() -> Any:
    """The `StateStore` that the variable INTERDOMAIN_PROMPT_STORE asks for, "memory" or a folder, or None."""
    place = os.environ.get(STORE_VARIABLE, "")
    if not place:
        return None
    from .prompt_store import StateStore

    return StateStore() if place == "memory" else StateStore(place)


def _rollback(config, generation_config) -> int:
    """The tokens that one round of assisted decoding may take back."""
    drafts = [generation_config.num_assistant_tokens, generation_config.prompt_lookup_num_tokens]
    if generation_config.is_assistant:
        drafts.append(generation_config.max_new_tokens)
    return max([config.max_rollback, *(n for n in drafts if n)])
