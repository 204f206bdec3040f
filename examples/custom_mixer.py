"""A token mixer of one's own in one file, beside the package and without a change to it.

Trains a small model whose first layer is a gated moving average and whose second is Interdomain Attention; prints the
loss as it falls, a text written with the cache, and the bytes that cache holds.

Usage:
    python -m examples.custom_mixer
    python -m examples.custom_mixer --data my_texts/ --steps 500 --prompt "Once "
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from examples.text_data import InputError, encode, exit_code, gather_documents, random_batches, train_tokenizer
from examples.training import train
from modeling_interdomain import InterdomainCache, TokenMixer, register_token_mixer

CONFIG = Path(__file__).resolve().parents[1] / "configuration" / "interdomain-tiny"


class MovingAverage(TokenMixer):
    """`h_t = a h_{t-1} + (1 - a) v_t` with a learned `a` a channel, read through a gate. Its state is `h`, `[B, W]`."""

    layer_type = "linear_attention"  # it keeps a state of fixed size, not keys and values

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.state_dtype = getattr(torch, config.state_dtype)  # also of the caches; bfloat16 would forget too soon
        width = config.hidden_size
        self.v_proj = nn.Linear(width, width, bias=False)
        self.g_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.decay = nn.Parameter(torch.linspace(0, 5, width))  # forgets half in 1 to 100 tokens

    def cache_shapes(self, batch: int) -> list[list[int]]:
        """What a cache holds of this layer: windows of convolutions, of which there are none, and the state."""
        return [[batch, self.decay.numel()]]

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        """The same in numbers, for `config.state_sizes`."""
        return {"recurrent": config.hidden_size}

    def forward(self, hidden_states, attention_mask=None, cache=None, packing=None, **kwargs):
        """Mix `[B, T, W]`; pads leave the state alone, and a packed document does not see the one before it.

        A decode step has its pads in `attention_mask` `[B, 1]`, anything longer in `packing`.
        """
        layer = None if cache is None else cache.layers[self.layer_idx]
        batch, length, width = hidden_states.shape
        a = self.decay.to(self.state_dtype).sigmoid()
        decays, values = a.expand(batch, length, width), (1 - a) * self.v_proj(hidden_states)

        pads, starts = _pads_and_starts(attention_mask, packing)
        if pads is not None:
            decays, values = decays.masked_fill(pads, 1), values.masked_fill(pads, 0)
        if starts is not None and layer is None:  # a cache goes on with the state it has
            decays = decays.masked_fill(starts, 0)

        state = values.new_zeros(batch, width)
        if layer is not None:
            layer.thaw()
            state = state if layer.state is None else layer.state
        states = []
        for decay, value in zip(decays.unbind(1), values.unbind(1)):  # plain to read; a scan would be faster
            state = decay * state + value
            states.append(state)
        if layer is not None:
            layer.write([], {"state": state}, length)
        averages = torch.stack(states, dim=1).to(hidden_states.dtype)
        return self.o_proj(F.silu(self.g_proj(hidden_states)) * averages), None


def _pads_and_starts(attention_mask, packing):
    """`[B, T, 1]` bool: which tokens are pads and which begin a document; None where none are.

    A single step gets the mask of its tokens, anything longer a `packing` of the real ones.
    """
    real = attention_mask if packing is None else packing.mask
    starts = None if packing is None else packing.starts
    return (None if real is None else ~real.bool()[..., None]), (None if starts is None else starts[..., None])


register_token_mixer("moving_average", MovingAverage)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=[], help="files, folders or datasets (default: Python's source)")
    parser.add_argument("--steps", type=int, default=100, help="of training (default: %(default)s)")
    parser.add_argument("--prompt", default="def ", help="what the model continues (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to write (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=512, help="tokens to learn (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    for name in ("steps", "tokens"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} must be positive, not {getattr(options, name)}.")
    set_seed(0)
    documents = gather_documents(options.data, max_bytes=500_000)
    tokenizer = train_tokenizer(documents, options.vocab_size)
    batches = random_batches(encode(tokenizer, documents), batch_size=8, sequence_length=64)
    config = AutoConfig.from_pretrained(
        CONFIG,
        token_mixers=["moving_average", "interdomain"],
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    print(f"{model.num_parameters():,} parameters, layers of {' and '.join(config.mixers_per_layer)}")
    for progress in train(model, batches, steps=options.steps, learning_rate=3e-3):
        if progress.step in (1, options.steps) or progress.step % 20 == 0:
            print(f"step {progress.step:4}  loss {progress.loss:.3f}", flush=True)

    cache = InterdomainCache(config)
    inputs = tokenizer(tokenizer.bos_token + options.prompt, return_tensors="pt", return_token_type_ids=False)
    ids = model.eval().generate(**inputs, cache=cache, max_new_tokens=options.tokens, do_sample=False)
    print(f"\n{tokenizer.decode(ids[0], skip_special_tokens=True)}\n")
    print(f"The cache holds {cache.state_bytes():,} bytes after {cache.get_seq_length()} tokens, as after the first.")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
