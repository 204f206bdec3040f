"""What a layer may be made of. Importing this puts classes into the tables that configurations read.

A configuration does with what a part says of itself, so it imports no layers; whoever makes layers imports this.
"""

from torch import nn

from .feed_forwards.configuration import FEED_FORWARDS
from .feed_forwards.cross_domain_moe import CrossDomainMoE
from .feed_forwards.mlp import InterdomainMLP
from .mixers.base import TokenMixer
from .mixers.inner_function.mixer import InnerFunctionMixer
from .mixers.interdomain.mixer import InterdomainMixer
from .mixers.s4d.mixer import S4DMixer
from .mixers.selective_scan.mixer import SelectiveScanMixer
from .mixers.softmax.mixer import SoftmaxMixer
from .mixers.specifications import TOKEN_MIXERS
from .mixers.ssd.mixer import SSDMixer
from .mixers.window.mixer import WindowMixer

TOKEN_MIXERS |= {
    "interdomain": InterdomainMixer,
    "s4d": S4DMixer,
    "softmax": SoftmaxMixer,
    "ssd": SSDMixer,
    "selective_scan": SelectiveScanMixer,
    "inner_function": InnerFunctionMixer,
    "window": WindowMixer,
}
FEED_FORWARDS |= {
    "mlp": InterdomainMLP,
    "cdmoe": CrossDomainMoE,
}

LAYER_TYPES = ("linear_attention", "full_attention", "hybrid")


def token_mixer_class(config, layer_idx: int) -> type[TokenMixer]:
    """The class of a layer's token mixer: with gates a subclass, which only models that have some carry."""
    name = config.mixers_per_layer[layer_idx]
    if name == "interdomain" and config.gates == "warp":
        from .mixers.interdomain.warped import WarpedInterdomainMixer

        return WarpedInterdomainMixer
    if name == "interdomain" and config.gate_names:
        from .mixers.interdomain.gated import GatedInterdomainMixer

        return GatedInterdomainMixer
    return TOKEN_MIXERS[name]  # type: ignore[return-value]  # importing this has made classes of all


def register_token_mixer(name: str, mixer_class: type[TokenMixer]) -> None:
    """Let `token_mixers` of a configuration name a mixer of one's own; `examples/custom_mixer.py` shows one.

    Args:
        name: what the configuration calls it. A folder with such a model loads after this call alone: the code of the
            class is not written into it, so that `trust_remote_code` cannot load it.
        mixer_class: a subclass of `TokenMixer`, which says what a mixer must say of itself. It is made as
            `mixer_class(config, layer_idx)` and called like `RecurrentMixer`; it returns the mixed tokens and None,
            or attention weights. Its last projection is `o_proj`.

    Raises:
        ValueError: when the name is taken, or the class is no token mixer or of a kind that the library does not know.
    """
    _check_free(name, TOKEN_MIXERS, "token mixer")
    if not (isinstance(mixer_class, type) and issubclass(mixer_class, TokenMixer)):
        raise ValueError(f"A token mixer must be a subclass of TokenMixer, got {mixer_class!r}.")
    if mixer_class.layer_type not in LAYER_TYPES:
        names = ", ".join(f'"{kind}"' for kind in LAYER_TYPES)
        kind = mixer_class.layer_type
        raise ValueError(f"layer_type of {mixer_class.__name__} must be one of {names}, got {kind!r}.")
    TOKEN_MIXERS[name] = mixer_class


def register_feed_forward(name: str, feed_forward_class: type[nn.Module]) -> None:
    """Let `feed_forwards` of a configuration name a feed-forward layer of one's own.

    Args:
        name: what the configuration calls it.
        feed_forward_class: a module made as `feed_forward_class(config, layer_idx)`; it maps `[B, T, hidden_size]` to
            the same. What it wants added to the training loss it hands to an `AuxiliaryLoss` of its own.

    Raises:
        ValueError: when the name is taken, or the class is no module.
    """
    _check_free(name, FEED_FORWARDS, "feed-forward layer")
    if not (isinstance(feed_forward_class, type) and issubclass(feed_forward_class, nn.Module)):
        raise ValueError(f"A feed-forward layer must be a subclass of torch.nn.Module, got {feed_forward_class!r}.")
    FEED_FORWARDS[name] = feed_forward_class


def _check_free(name: str, table: dict, what: str) -> None:
    if name in table:
        owner = "no layer at all" if table[name] is None else table[name].__name__
        raise ValueError(f"The name {name!r} belongs to the {what} {owner}: choose another.")
