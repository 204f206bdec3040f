"""The keywords of a forward: names of other libraries are taken too, and what nothing reads is refused."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layers.versions import takes_cache
from ..mixers.base import mixers_of

# Names that other libraries have for an argument of these models.
_OTHER_NAMES = {
    "cu_seqlens": "cu_seq_lens_q",  # flash-linear-attention
}
_READ = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "is_causal", "sequence_group"),
    *("num_items_in_batch", "shift_labels", "ignore_index"),  # by the loss
    *("return_dict", "debug_io", "debug_io_dir", "prune_layers"),  # by decorators of the library
    # Accepted without effect: they say what `cu_seq_lens_q` and the cache say already, or that tokens are of one type.
    *("max_length_q", "max_length_k", "cache_position", "token_type_ids"),
    *("tokenizer", "assistant_tokenizer", "assistant_model"),  # generate() reads them, and passes them on
}


def takes_known_keywords(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward of a model take its cache by any name, and refuse keywords that nothing reads.

    Something reads what the forward names, `_READ`, and what the attention function or a mixer names. None is never
    refused, and neither is False for an output.

    Raises:
        TypeError: for a keyword that would have no effect, or two names of one argument.
    """
    own = _READ | set(inspect.signature(forward).parameters)

    def check(model, kwargs: dict[str, Any]) -> None:
        if unknown := [name for name in kwargs if name not in own and kwargs[name] is not None]:
            _refuse_unread(model, {name: kwargs[name] for name in unknown})

    return takes_cache(forward, _OTHER_NAMES, check)


def _refuse_unread(model, kwargs: dict[str, Any]) -> None:
    read = [f"output_{name}" for name in model._can_record_outputs]
    read += [name for name, x in kwargs.items() if x is False and name.startswith("output_")]
    unread = kwargs.keys() - set(read)
    if unread:  # no graph looks into a signature, and few forwards come here
        functions = [mixer.forward for mixer in mixers_of(model.base_model.layers)]
        if "full_attention" in model.config.layer_types and model.config._attn_implementation != "eager":
            functions.append(ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, None))
        unread = unread.difference(*(inspect.signature(x).parameters for x in functions))
    if unread:
        raise TypeError(
            f"{type(model).__name__} does not know {', '.join(sorted(unread))}, which would have no effect: correct "
            "the name, or leave it out."
        )
