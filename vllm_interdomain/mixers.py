"""Our token mixers over the pages of vLLM's cache."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from modeling_interdomain.layers.common import project, project_all
from modeling_interdomain.mixers.interdomain.gated import GatedInterdomainMixer
from modeling_interdomain.mixers.interdomain.mixer import InterdomainMixer
from modeling_interdomain.mixers.s4d.mixer import S4DMixer
from modeling_interdomain.mixers.selective_scan.mixer import SelectiveScanMixer
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer
from modeling_interdomain.mixers.ssd.mixer import SSDMixer
from modeling_interdomain.mixers.window.attention import WindowAttention
from modeling_interdomain.mixers.window.mixer import WindowMixer
from modeling_interdomain.ops.common.packing import Packing, packing_from_documents
from modeling_interdomain.ops.common.slots import read_slots, write_slots
from modeling_interdomain.registry import token_mixer_class

from .pages import Shapes, inputs_after, page_dtypes, page_size, shapes_of


@dataclass
class Batch:
    """The tokens of a forward: first one each of `decodes` sequences, then those of others, packed.

    Attributes:
        packing: of the others; None where there are none.
        begun: `[S]` bool, which of the others go on from a state; None where no cache is there yet.
        positions: `[N]`, of all tokens in their sequences.
    """

    decodes: int
    packing: Packing | None
    begun: torch.Tensor | None
    positions: torch.Tensor
    _pages: dict = field(default_factory=dict)

    @cached_property
    def ends(self) -> list[int]:
        """Where the others begin and end along `packing`, asked of the device once a forward."""
        return self.packing.cu_seqlens.tolist()

    @cached_property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.ends, self.ends[1:])]

    def pages(self, metadata: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of the decodes and of the others, as indices; the layers of a pool share them, and `metadata`."""
        if metadata is None:
            return None, None
        if id(metadata) not in self._pages:
            decodes = metadata.state_indices_tensor_d[: self.decodes].flatten().long() if self.decodes else None
            others = None if self.packing is None else metadata.state_indices_tensor_p.long()
            self._pages[id(metadata)] = decodes, others
        return self._pages[id(metadata)]


def batch_of(metadata: Any, positions: torch.Tensor) -> Batch:
    """From what vLLM says of a recurrent layer; None is said when it tries how much memory a forward takes."""
    if metadata is None:
        tokens = positions.shape[0]
        cu_seqlens = torch.tensor([0, tokens], device=positions.device)
        return Batch(0, packing_from_documents(cu_seqlens, None, (1, tokens)), None, positions)
    packing = None
    if metadata.num_prefills:
        shape = 1, metadata.num_prefill_tokens
        packing = packing_from_documents(metadata.query_start_loc_p, None, shape)
    return Batch(metadata.num_decode_tokens, packing, metadata.has_initial_states_p, positions)


class Paged(MambaBase):
    """The part of a recurrent mixer that reads and writes pages. It stands before the class of the mixer."""

    # Of vLLM's kinds the one whose metadata are those of any layer with a page a sequence.
    mamba_type = MambaAttentionBackendEnum.SHORT_CONV

    def attach(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Let vLLM give this layer pages; it is known there by its name in the model."""
        self.prefix, self.dtype = prefix, vllm_config.model_config.dtype
        self.shapes = self.page_shapes()
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def page_shapes(self) -> Shapes:
        *inputs, state = self.kept_shapes
        return shapes_of(state, inputs)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return page_dtypes(self.shapes, self.dtype)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """As in vLLM, with pages as large as those of the other layers, with which it shares a pool."""
        spec = super().get_kv_cache_spec(vllm_config)
        shapes = largest_page(self.config, get_tensor_model_parallel_world_size(), self.dtype)
        size = max(page_size(shapes, self.dtype), spec.page_size_padded or 0)
        return replace(spec, page_size_padded=size)

    def forward(
        self, hidden_states: torch.Tensor, batch: Batch, position_embeddings=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """Mix tokens `[1, N, hidden_size]` with the past of their sequences, and write down what they leave."""
        projected = project_all([getattr(self, f"{name}_proj") for name in self.projection_names], hidden_states)
        rotated = self.rope_placement is not None and position_embeddings is not None
        cos_sin = position_embeddings[self.rotated_width] if rotated else None
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        count, outputs = batch.decodes, []
        decodes, others = batch.pages(metadata)
        if count:
            tokens = [x[0, :count, None] for x in projected]
            turn = None if cos_sin is None else tuple(x[0, :count, None] for x in cos_sin)
            outputs.append(self._take_steps(tokens, turn, decodes, batch))
        if batch.packing is not None:
            end = count + batch.packing.shape[1]
            tokens = [x[:, count:end] for x in projected]
            turn = None if cos_sin is None else tuple(x[:, count:end] for x in cos_sin)
            outputs.append(self._read_texts(tokens, turn, others, batch))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if output.shape[0] < hidden_states.shape[1]:  # what fills a batch up to a size
            output = torch.cat([output, output.new_zeros(hidden_states.shape[1] - output.shape[0], *output.shape[1:])])
        if self.o_norm is not None:
            output = self.o_norm(output)
        output = output[None].flatten(-2).to(hidden_states.dtype)
        return project(self.o_proj, self._way_out(output, hidden_states)), None

    def _take_steps(self, projected: list[torch.Tensor], cos_sin, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """One token each of B sequences, `[B, 1, width]`, whose pages are `rows`; the output `[B, H, D]`."""
        states, inputs = self.kv_cache[0], self.kv_cache[1:]
        tokens, after = self._inputs(projected, self._conv_states(projected, rows), cos_sin, None, keep=True)
        for pool, conv_state in zip(inputs, after):
            write_slots(pool, rows, conv_state.mT)
        return self.recurrence(*tokens, step=True, state=states, state_indices=rows)

    def _read_texts(
        self, projected: list[torch.Tensor], cos_sin, rows: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Packed texts `[1, T, width]`, whose pages are `rows`, on from these where they have begun; `[T, H, D]`."""
        packing, begun = batch.packing, batch.begun
        if rows is None:
            tokens, _ = self._inputs(projected, None, cos_sin, packing, keep=False)
            return self.recurrence(*tokens, cu_seqlens=packing.cu_seqlens)[0][0]
        states, inputs = self.kv_cache[0], self.kv_cache[1:]
        conv_states = self._conv_states(projected, rows, begun)
        alone = rows.shape[0] == 1  # it is a row of a batch then, in which nothing must be looked up
        tokens, _ = self._inputs(projected, conv_states, cos_sin, None if alone else packing, keep=False)
        for pool, x, conv_state in zip(inputs, self._convolved(projected), conv_states):
            write_slots(pool, rows, inputs_after(x[0], conv_state.mT, packing.cu_seqlens))
        state = read_slots(states, rows, begun)
        ends = None if alone else packing.cu_seqlens
        output, after = self.recurrence(*tokens, cu_seqlens=ends, initial_state=state, output_final_state=True)
        write_slots(states, rows, after)
        return output[0]

    def _conv_states(
        self, projected: list[torch.Tensor], rows: torch.Tensor, begun: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """`[B, width, tokens]` of each convolution, zeros for what has not begun."""
        if self.kernel == 1:
            return [x.new_zeros(rows.shape[0], x.shape[-1], 0) for x in self._convolved(projected)]
        return [read_slots(pool, rows, begun).mT for pool in self.kv_cache[1:]]


class PagedInterdomain(Paged, InterdomainMixer):  # type: ignore[misc]
    pass


class PagedGatedInterdomain(Paged, GatedInterdomainMixer):  # type: ignore[misc]
    pass


class PagedS4D(Paged, S4DMixer):  # type: ignore[misc]
    pass


class PagedSSD(Paged, SSDMixer):  # type: ignore[misc]
    pass


class PagedSelectiveScan(Paged, SelectiveScanMixer):  # type: ignore[misc]
    pass


class PagedWindow(Paged, WindowMixer):  # type: ignore[misc]
    """Its pages have the state, where there is one, and the keys and values of the window and of the sinks, together.

    How many tokens were read their positions say. A step copies the windows of its sequences together and back: the
    mixer has no slots for them.
    """

    def attach(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().attach(vllm_config, prefix)
        self.attention = WindowAttention(self.config)  # with angles, which no checkpoint has

    def page_shapes(self) -> Shapes:
        key, value, _, *sinks, state = self.kept_shapes
        return shapes_of(state, [(key[0], sum(count for _, count in (key, value, *sinks)))])

    def _take_steps(self, projected: list[torch.Tensor], cos_sin, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        held = self._held(rows, batch.positions[: batch.decodes])
        tokens, after = self._inputs(projected, held, None, None, keep=True)
        self._hold(rows, after)
        read = None
        if self.memory:
            read = self.recurrence(*tokens[:3], step=True, state=self.kv_cache[0], state_indices=rows)[:, None]
        return self._joined(tokens, read)[:, 0]

    def _read_texts(
        self, projected: list[torch.Tensor], cos_sin, rows: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Each text sees its own window, one after the other; the state reads them together."""
        packing, begun = batch.packing, batch.begun
        if rows is None:
            tokens, _ = self._inputs(projected, None, None, packing, keep=False)
            return self._joined(tokens, self.recurrence(*tokens[:3], cu_seqlens=packing.cu_seqlens)[0])[0]
        read_before = batch.positions[batch.decodes + packing.cu_seqlens[:-1]]
        held = zip(*(x.split(1) for x in self._held(rows, read_before, begun)))
        texts = zip(*(x.split(batch.lengths, dim=1) for x in projected))
        each = [self._inputs(list(text), list(x), None, None, keep=True) for text, x in zip(texts, held)]
        self._hold(rows, [torch.cat(x) for x in zip(*(after for _, after in each))])
        read = [None] * len(each)
        if self.memory:
            state = read_slots(self.kv_cache[0], rows, begun)
            together = [torch.cat(x, dim=1) for x in zip(*(tokens[:3] for tokens, _ in each))]
            output, state = self.recurrence(
                *together, cu_seqlens=packing.cu_seqlens, initial_state=state, output_final_state=True
            )
            write_slots(self.kv_cache[0], rows, state)
            read = output.split(batch.lengths, dim=1)
        return torch.cat([self._joined(tokens, x)[0] for (tokens, _), x in zip(each, read)])

    def _held(
        self, rows: torch.Tensor, read_before: torch.Tensor, begun: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """What the mixer keeps in a cache beside the state, of sequences with so many tokens `[B]` before."""
        counts = 2 * [self.window] + 2 * [self.sinks]
        key, value, *sinks = read_slots(self.kv_cache[-1], rows, begun).mT.split(counts, dim=2)
        return [key, value, read_before[:, None, None], *sinks]

    def _hold(self, rows: torch.Tensor, after: list[torch.Tensor]) -> None:
        key, value, _, *sinks = after
        write_slots(self.kv_cache[-1], rows, torch.cat([x.mT for x in (key, value, *sinks)], dim=1))


class PagedSoftmax(SoftmaxMixer):
    """Softmax attention by vLLM, whose cache keeps keys and values."""

    def attach(self, vllm_config: VllmConfig, prefix: str) -> None:
        processes = get_tensor_model_parallel_world_size()
        self.attn = Attention(
            self.config.num_attention_heads // processes,
            self.head_dim,
            self.scaling,
            num_kv_heads=self.config.num_key_value_heads // processes,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def _attend(self, query, key, value, mask, **kwargs) -> tuple[torch.Tensor, None]:
        output = self.attn(*(x[0].transpose(0, 1).flatten(1) for x in (query, key, value)))
        return output.view(1, query.shape[2], query.shape[1], -1), None


_CLASSES = (
    PagedInterdomain,
    PagedGatedInterdomain,
    PagedS4D,
    PagedSSD,
    PagedSelectiveScan,
    PagedWindow,
    PagedSoftmax,
)
# By the class of the package that each is made of.
MIXERS: dict[type, Any] = {kind.__bases__[-1]: kind for kind in _CLASSES}


def largest_page(config: Any, processes: int, dtype: torch.dtype) -> Shapes:
    """Of the recurrent layers of a model, which share a pool of pages; so many processes share their heads."""
    first = {name: i for i, name in reversed(list(enumerate(config.mixers_per_layer)))}
    with torch.device("meta"):
        mixers = [MIXERS[token_mixer_class(config, i)](config, i) for i in first.values()]
    pages = []
    for mixer in mixers:
        if isinstance(mixer, Paged):
            if processes > 1:
                mixer.share_heads(processes)
            pages.append(mixer.page_shapes())
    return max(pages, key=lambda shapes: page_size(shapes, dtype), default=())
