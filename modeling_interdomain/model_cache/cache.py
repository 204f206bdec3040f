"""The caches of a model: a layer for each of its token mixers, whose class says which."""

import os
import weakref
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from ..cache.recurrent import RecurrentLayer
from ..layers.common import doubt_tables, home_of
from ..registry import token_mixer_class
from .file import StateFileError, read_state_file, write_state_file
from .fingerprint import (
    decoder_of,
    model_fingerprint,
    tokenizer_fingerprint,
    tokens_fingerprint,
    weights_as_they_are,
)


class _InterdomainCacheMixin(Cache):
    """What both caches share."""

    layers: list
    notes: dict[str, str]
    # A weak reference to the model that read with it last, and its weights as it began; pickles leave both out.
    _reader: tuple | None = None
    # Which tokens were read as real, `[B, n]` bool, and the mask of the last step that may have had a pad; those behind
    # both were real (a compiled forward is taken to have no pads). None: not known.
    _read_mask: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    def reader(self) -> Any:
        """The model that read with it last, None where that is not known."""
        return None if self._reader is None else self._reader[0]()

    def reset(self) -> None:
        """Hold nothing, as a new cache."""
        super().reset()
        self._reader = self._read_mask = None

    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def allow_rollback(self, tokens: int) -> None:
        """Let layers of a fixed size take back at least this many tokens from now on."""
        for layer in self.layers:
            if hasattr(layer, "max_rollback"):
                layer.max_rollback = max(layer.max_rollback, tokens)

    @property
    def records(self) -> bool:
        """Whether any state is recorded (`activate_past_recording`)."""
        return any(layer.record_past for layer in self.recurrent_layers())

    def pause_recording(self, paused: bool) -> None:
        """Stop recording for a while, or go on; what was read before a pause can no longer be taken back."""
        for layer in self.recurrent_layers():
            layer.paused = paused

    def stop_recording(self) -> None:
        """Stop recording; what was read can no longer be taken back, except in layers that keep all of it anyway."""
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def commit(self) -> None:
        """Let the states take in pending inputs; call it before you read a state of a cache that records."""
        for layer in self.recurrent_layers():
            layer.commit()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self.commit()
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self.commit()
        return super().get_recurrent_state(layer_idx, state_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens in all layers, or in none if one cannot."""
        seen = int(self.get_seq_length())
        if -tokens_to_remove > seen:
            raise ValueError(f"crop can take back the last {seen} tokens, no more were read, got {-tokens_to_remove}.")
        if tokens_to_remove and not all(hasattr(layer, "crop") for layer in self.layers):
            raise ValueError(
                "A static cache of keys and values cannot take tokens back: use InterdomainCache for that."
            )
        for layer in self.layers:
            if hasattr(layer, "check_crop"):
                layer.check_crop(tokens_to_remove)
        for layer in self.layers if tokens_to_remove else ():
            layer.crop(tokens_to_remove)
        if self._read_mask is not None:
            (known, last), left = self._read_mask, seen + tokens_to_remove
            self._read_mask = known[:, :left], None if last is None else last[:, :left]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i go on with what row `beam_idx[i]` has read; wrong indices are refused if they are on a CPU."""
        self._check_rows("reorder_cache", beam_idx)
        self._read_mask = None
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Hold these rows alone, by number or a mask `[B]`; wrong indices are refused if they are on a CPU."""
        self._check_rows("batch_select_indices", indices)
        self._read_mask = None
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Hold every row `repeats` times, one copy after the other."""
        self._check_rows("batch_repeat_interleave")
        if repeats < 1:
            raise ValueError(f"batch_repeat_interleave takes a number of copies from 1, got {repeats}.")
        self._read_mask = None
        super().batch_repeat_interleave(repeats)

    def _check_rows(self, name: str, asked: torch.Tensor | None = None) -> None:
        """Raise if a method is not possible, before any layer has changed its rows."""
        if not all(hasattr(layer, name) for layer in self.layers):
            raise ValueError(f"A static cache of keys and values has no {name}: use InterdomainCache for that.")
        if asked is not None and (not isinstance(asked, torch.Tensor) or asked.ndim != 1 or asked.is_floating_point()):
            raise ValueError(f"{name} takes the numbers of rows as a tensor of one axis, got {asked!r}.")
        count = next((held.shapes[0][0] for held in map(contents_of, self.layers) if held.shapes), None)
        if asked is None or count is None or asked.device.type != "cpu":  # to look at a GPU's would wait for it
            return
        least = -count if name == "batch_select_indices" else 0
        masked = asked.dtype == torch.bool and least < 0
        wrong = len(asked) != count if masked else any(not least <= row < count for row in asked.tolist())
        if wrong or not (asked.any() if masked else len(asked)):
            what = f"a mask of {len(asked)}" if masked and wrong else asked.tolist()
            raise ValueError(f"{name} takes numbers of the {count} rows of this cache, from 0, got {what}.")

    def to(self, device=None, dtype: torch.dtype | None = None):
        """Move every layer to a device, and its states to a dtype; returns the cache."""
        for layer in self.layers:
            if kind_of(layer) in ("recurrent", "window"):
                layer.to(device, dtype)
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(device, dtype), layer.values.to(device, dtype)
                layer.device, layer.dtype = layer.keys.device, layer.keys.dtype
                if isinstance(layer, StaticLayer):
                    layer.cumulative_length = layer.cumulative_length.to(device)
        return self

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the next token reads, `[B, ...]` each, by layer and name; not the record of past tokens."""
        check_unbroken(self)
        return {f"{i}.{name}": x for i, layer in enumerate(self.layers) for name, x in _tensors_of(layer, i).items()}

    def restore(self, tensors: dict[str, torch.Tensor], tokens: int, model) -> None:
        """Fill an empty cache with the `named_tensors` of one after `tokens` tokens, on the devices of the model."""
        doubt_tables(decoder_of(model))  # a text begins here, although its first tokens are in the cache
        for i, (layer, module) in enumerate(zip(self.layers, decoder_of(model).layers)):
            home = home_of(module.token_mixer.o_proj)
            own = {name.partition(".")[2]: x.to(home) for name, x in tensors.items() if name.startswith(f"{i}.")}
            if hasattr(layer, "restore") and own:
                layer.restore(own, tokens)
            elif own:
                layer.update(own["keys"], own["values"])

    def save(
        self,
        path: str | os.PathLike,
        model=None,
        *,
        tokenizer=None,
        tokens: torch.Tensor | None = None,
        notes: dict[str, str] | None = None,
    ) -> None:
        """Save what was read so far as one safetensors file, whole or not at all.

        A cache that `load` makes of it goes on bit for bit as this one would. It takes back only tokens that it has
        read itself: the record of past tokens (`activate_past_recording`) is not saved.

        Args:
            path: of the file, in a folder that exists; a file of that name is replaced when the new one is complete.
            model: whose state it is, also if its weights were written since it has read. Default: None, the model that
                read with this cache last.
            tokenizer: that made the tokens, to be compared when the file is loaded. Default: None.
            tokens: `[B, T]` ids of all tokens that were read, pads too, of which a hash is kept. `generate()` returns
                one more, the last, which no forward has read. Default: None.
            notes: anything else, as strings; a loaded cache has it as `notes`. Default: None.

        Raises:
            ValueError: when nothing was read, the model is not known, another has read, `tokens` is of another shape,
                or, where `model` is None, weights or adapters were written since.
            TypeError: when `notes` are not strings.
            OSError: when the file cannot be written; one that was there is as it was.
        """
        if wrong := [name for item in (notes or {}).items() for name in item if not isinstance(name, str)]:
            raise TypeError(f"notes must be strings by name, got {wrong[0]!r}.")
        decoder = self.reader() if model is None else model
        if decoder is None:
            raise ValueError("save does not know whose state this is: give the model, save(path, model).")
        seen = int(self.get_seq_length())
        if not seen:
            raise ValueError("This cache has read nothing that could be saved.")
        tensors = self.named_tensors()
        rows = next(iter(tensors.values())).shape[0]
        given = list(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        if tokens is not None and given != [rows, seen]:
            raise ValueError(f"tokens must have shape [B, T] = [{rows}, {seen}], what the cache has read, got {given}.")
        about = {f"note.{name}": text for name, text in (notes or {}).items()}
        about |= {"rows": str(rows), "tokens": str(seen)} | _fingerprints(decoder, tokenizer, tokens)
        self._check_reader(decoder_of(decoder), about["model"], told=model is not None)
        write_state_file(path, tensors, about)

    def _check_reader(self, decoder, fingerprint: str, told: bool) -> None:
        """Raise if another model than this one has read, as far as that is known, or if its weights were written since
        and nobody has `told` that the state is still its own."""
        reader = self.reader()
        if reader is None:
            return
        if not told and self._reader[1] != weights_as_they_are(reader):
            raise ValueError(
                "Weights or adapters of the model were written after this cache had begun to read, and the file would "
                "name them: save it before, read the text again, or, if they are as they were, give the model, "
                "save(path, model)."
            )
        if reader is not decoder and model_fingerprint(reader) != fingerprint:
            raise ValueError("Another model has read what this cache holds: save it with that one.")

    @classmethod
    def load(cls, path: str | os.PathLike, model, *, tokenizer=None, tokens: torch.Tensor | None = None, **arguments):
        """The cache that `save` wrote, on the devices of the model, to go on with.

        Args:
            path: of the file.
            model: with the weights of the one that read the text (`model_fingerprint` says what must be the same).
            tokenizer: if given, the file must have been saved with the same.
            tokens: `[B, T]`; if given, the file must be that of these tokens.
            arguments: what the cache is made with: `max_cache_len` of an `InterdomainStaticCache`. Each kind of cache
                loads what the other has saved.

        Returns:
            A new cache; its `notes` are those that were saved.

        Raises:
            FileNotFoundError: when there is no such file.
            ValueError: when the file is torn or altered, of another model, tokenizer or text, or does not fit in.
        """
        tensors, about = read_state_file(path)
        decoder = decoder_of(model)
        for name, fingerprint in _fingerprints(decoder, tokenizer, tokens).items():
            _check_fingerprint(path, name, about.get(name), fingerprint)
        seen = int(about["tokens"])
        make: Any = cls
        cache = make(decoder.config, **arguments)
        for layer in cache.layers:
            if isinstance(layer, StaticLayer) and seen > layer.max_cache_len:
                raise ValueError(
                    f"{path} holds {seen} tokens, and max_cache_len={layer.max_cache_len} leaves room for fewer."
                )
        cache.restore(tensors, seen, decoder)
        remember_model(cache, decoder, begins=True)
        cache.notes = {name[5:]: text for name, text in about.items() if name.startswith("note.")}
        return cache

    def state_bytes(self) -> int:
        """Bytes of states, conv states and windows of keys: the part of the cache that does not grow."""
        fixed = [layer for layer in self.layers if kind_of(layer) in ("recurrent", "window")]
        return sum(x.numel() * x.element_size() for layer in fixed for x in layer.tensors())


class InterdomainCache(_InterdomainCacheMixin, DynamicCache):
    """The cache of an Interdomain model: what `generate()` and a forward with `use_cache=True` make.

    Args:
        config: the model's `InterdomainConfig`.
        offloading: as in the library's caches; only False is possible: every token needs the states.

    Raises:
        ValueError: when offloading is asked for, or `config` is not of this family of models.

    Example:

        >>> import torch
        >>> from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).eval()
        >>> cache = InterdomainCache(config)
        >>> output = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> cache.get_seq_length()
        3
        >>> cache.save("three_tokens.safetensors")
        >>> InterdomainCache.load("three_tokens.safetensors", model).get_seq_length()
        3
    """

    def __init__(self, config, offloading: bool = False, **kwargs):
        Cache.__init__(self, layers=_make_layers(config, offloading))


class InterdomainStaticCache(_InterdomainCacheMixin, StaticCache):
    """An `InterdomainCache` with fixed addresses everywhere, for a compiled or captured decode step.

    Args:
        config: the model's `InterdomainConfig`.
        max_cache_len: tokens that softmax layers can hold; recurrent layers have no limit.
        offloading: as in `InterdomainCache`.

    Raises:
        ValueError: as in `InterdomainCache`.
    """

    def __init__(self, config, max_cache_len: int, offloading: bool = False, **kwargs):
        Cache.__init__(self, layers=_make_layers(config, offloading, max_cache_len))


def _tensors_of(layer, index: int) -> dict[str, torch.Tensor]:
    """What the next token reads of a layer, if it has read any."""
    if not layer.is_initialized:
        return {}
    if hasattr(layer, "named_tensors"):
        return layer.named_tensors()
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ValueError(f"Layer {index} of this cache is a {type(layer).__name__}, which cannot be saved.")
    seen = int(layer.get_seq_length())
    return {"keys": layer.keys[:, :, :seen], "values": layer.values[:, :, :seen]}


def _fingerprints(model, tokenizer, tokens: torch.Tensor | None) -> dict[str, str]:
    """What a file says of whose state it is, as far as that is given."""
    found = {"model": model_fingerprint(model)}
    if tokenizer is not None:
        found["tokenizer"] = tokenizer_fingerprint(tokenizer)
    if tokens is not None:
        found["tokens_fingerprint"] = tokens_fingerprint(tokens)
    return found


def _check_fingerprint(path, name: str, found: str | None, wanted: str) -> None:
    if found == wanted:
        return
    what = {"model": "model", "tokenizer": "tokenizer", "tokens_fingerprint": "text"}[name]
    if found is None:
        raise StateFileError(f"{path} does not say of which {what} it is: save it with its {what}.")
    raise StateFileError(
        f"{path} is the state of another {what} (fingerprint {found[:12]}, not {wanted[:12]}): load it with the one it "
        "was saved with."
    )


def remember_model(cache: Any, decoder, begins: bool) -> None:
    """Let a cache know for which model `save` keeps it, and the weights with which a text begins, or goes on there."""
    if isinstance(cache, _InterdomainCacheMixin) and (begins or cache.reader() is not decoder):
        cache._reader = weakref.ref(decoder), weights_as_they_are(decoder)


def remember_mask(cache: Any, mask: Any, shape: tuple[int, ...], begins: bool, pads: bool) -> None:
    """Note in a cache which of the tokens `[B, T]` of a forward were hidden, without a mask none.

    Args:
        mask: of the forward; what a step tells of the past is not heeded.
        begins: whether the cache had read nothing.
        pads: whether a step may have some.
    """
    if not isinstance(cache, _InterdomainCacheMixin) or (mask is None and not begins):
        return
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        cache._read_mask = None
    elif begins or shape[1] > 1:
        cache._read_mask = torch.empty(shape[0], 0, dtype=torch.bool) if mask is None else mask != 0, None
    elif pads and cache._read_mask is not None:
        cache._read_mask = cache._read_mask[0], mask.detach()


def as_it_was_read(mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """A mask `[B, past]` of what a cache has read; the given one where that is not known, or where all layers hold keys
    and values, which can be hidden later."""
    known, last = getattr(cache, "_read_mask", None) or (None, None)
    if known is None or len(known) != len(mask) or all(kind_of(layer) == "keys_values" for layer in cache.layers):
        return mask
    parts = [known[:, : mask.shape[1]].to(mask)]
    if last is not None:
        parts.append((last[:, known.shape[1] : mask.shape[1]] != 0).to(mask))
    rest = mask[:, sum(part.shape[1] for part in parts) :]
    return torch.cat([*parts, torch.ones_like(rest)], dim=1)


def mark_reading(cache: Cache, since: int | None) -> None:
    """Note in a cache that a forward is writing into it, which found `since` tokens there (-1 if that is on a GPU);
    None: it has ended."""
    if not torch.compiler.is_compiling():
        cache.being_read_since = since


def check_unbroken(cache: Any) -> None:
    """Raise if a forward was broken off after it had begun to write into a cache; `reset()` makes that usable."""
    since = getattr(cache, "being_read_since", None)
    if since is None or torch.compiler.is_compiling():
        return
    lengths = {int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length")}
    if not (lengths <= {since} or lengths <= {0}) or any(getattr(layer, "torn", False) for layer in cache.layers):
        raise ValueError(
            "A forward was broken off while it wrote into this past_key_values, whose layers have read different "
            "texts since: call its reset() and read the text again, or go on with a new one."
        )
    mark_reading(cache, None)


def ready_to_step(cache: Cache) -> bool:
    """Whether every recurrent layer has the tensors that a decode step updates in place."""
    return all(layer.is_initialized for layer in cache.layers if isinstance(layer, RecurrentLayer))


def is_at_start(cache: Cache) -> bool:
    """Whether there are recurrent layers, and they have read nothing."""
    recurrent = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    return bool(recurrent) and not recurrent[0].has_previous_state[0]


def kind_of(layer) -> str:
    """What a layer of any cache holds: "recurrent", "window", "keys_values" or "other"."""
    if (kind := getattr(layer, "kind", None)) is not None:
        return kind
    return "keys_values" if hasattr(layer, "keys") and not hasattr(layer, "recurrent_states") else "other"


class LayerContents(NamedTuple):
    """Shapes of what a layer of any cache holds, and the device of a state; None as long as it holds nothing."""

    shapes: list[list[int]] | None = None
    device: torch.device | None = None


def contents_of(layer) -> LayerContents:
    """The shapes as `cache_shapes` of a mixer gives them: of keys and values batch, heads and head size."""
    if isinstance(layer, RecurrentLayer):
        held = layer.held()
        return LayerContents([list(x.shape) for x in held], held[-1].device) if held else LayerContents()
    keys = getattr(layer, "keys", None)
    if keys is None or not layer.is_initialized or keys.ndim != 4:
        return LayerContents()
    return LayerContents([[*keys.shape[:2], keys.shape[3]]])


def _make_layers(config, offloading: bool, *length: int) -> list:
    if not hasattr(config, "mixers_per_layer"):
        raise ValueError(
            f"This cache is made for the config of an Interdomain model, got {type(config).__name__}; the library's "
            "DynamicCache and StaticCache are for other models."
        )
    if offloading:
        raise ValueError("A state of fixed size is needed at every token and is not offloaded: leave offloading=False.")
    mixers = [token_mixer_class(config, i) for i in range(config.num_hidden_layers)]
    return [mixer.make_cache_layer(config, *length) for mixer in mixers]
