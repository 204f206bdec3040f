"""The keywords of a forward: what other libraries call by another name is taken, and what nothing reads refused."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layers.versions import other_cache_names, rename, shown_signature

# What other libraries call an argument of these models; every forward takes it.
OTHER_NAMES = {
    "cu_seqlens": "cu_seq_lens_q",  # flash-linear-attention
}

_READ = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "is_causal", "sequence_group"),
    *("num_items_in_batch", "shift_labels", "ignore_index"),  # by the loss
    *("return_dict", "debug_io", "debug_io_dir", "prune_layers"),  # by decorators of the library
    # Without a meaning here: documents tell the longest, a cache where its text goes on, and tokens are of one type.
    *("max_length_q", "max_length_k", "cache_position", "token_type_ids"),
    *("tokenizer", "assistant_tokenizer"),  # generate() reads them, and hands them on
}


def understood(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of a model that takes `OTHER_NAMES`, its cache by any name, and of other keywords what something reads.

    These are what it names, what is named above, and what the attention function or a mixer names. None asks for
    nothing, and neither does False for an output.

    Raises:
        TypeError: for a keyword that would have no effect, or two names of one argument.
    """
    own, names = _READ | set(inspect.signature(forward).parameters), OTHER_NAMES | other_cache_names(forward)

    @wraps(forward)
    def call(self, *args, **kwargs):
        for name in names:
            if name in kwargs:
                rename(kwargs, name, names[name])
        if unknown := [name for name in kwargs if name not in own and kwargs[name] is not None]:
            _refuse_unread(self, {name: kwargs[name] for name in unknown})
        return forward(self, *args, **kwargs)

    call.__signature__ = shown_signature(forward)  # type: ignore[attr-defined]
    return call


def _refuse_unread(model, kwargs: dict[str, Any]) -> None:
    read = [f"output_{name}" for name in model._can_record_outputs]
    read += [name for name, x in kwargs.items() if x is False and name.startswith("output_")]
    unread = kwargs.keys() - set(read)
    if unread:  # no graph looks into a signature, and few forwards come here
        functions = [layer.token_mixer.forward for layer in model.base_model.layers]
        if "full_attention" in model.config.layer_types and model.config._attn_implementation != "eager":
            functions.append(ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, None))
        unread = unread.difference(*(inspect.signature(x).parameters for x in functions))
    if unread:
        raise TypeError(
            f"{type(model).__name__} does not know {', '.join(sorted(unread))}, which would have no effect: correct "
            "the name, or leave it out."
        )
